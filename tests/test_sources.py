"""Models of other libraries, saved in their own formats and loaded by name, against the libraries' own inference."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import segprox
from segprox import SegproxError
from segprox.models.sources import SOURCES, ddcat, mmseg
from segprox.optional import require
from tests.torchvision_ops import make_importable

make_importable()
pytestmark = pytest.mark.filterwarnings("ignore")  # these libraries warn of each other, and of themselves
SIZES = [(64, 96), (75, 101)]  # a multiple of 32, and not
CLASSES = 7
MEAN, STD = (torch.tensor(v).view(-1, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def pixels(size, seed=0):
    """An 8-bit image `[3, H, W]`, as a library would read it from a file."""
    return torch.randint(0, 256, (3, *size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def assert_same(ours, theirs):
    spread = theirs.max() - theirs.min()
    assert ours.shape == theirs.shape
    assert spread > 0
    assert (ours - theirs).abs().max() <= 1e-4 * spread


def lively(network):
    """Weights and statistics that are not the initial ones, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(1)
    for name, value in network.state_dict().items():
        if name.endswith("running_var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=generator))
        elif name.endswith("running_mean") or (name.endswith("bias") and value.is_floating_point()):
            value.copy_(0.1 * torch.randn(value.shape, generator=generator))
        elif any(part in name for part in ("class_predictor", "mask_embedder", "mask_projection")):
            value.mul_(40)  # or every pixel of MaskFormer and its like has the same class
    return network.eval()


# --- transformers


def swin():
    from transformers import SwinConfig

    stages = ["stage1", "stage2", "stage3", "stage4"]
    return SwinConfig(
        image_size=64, embed_dim=12, depths=[1] * 4, num_heads=[1, 2, 2, 2], window_size=4, out_features=stages
    )


def hf_network(kind):
    import transformers as t

    vit = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    queries = {
        "num_labels": CLASSES, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 9,
        "dim_feedforward": 32, "encoder_feedforward_dim": 32, "hidden_dim": 32,
    }  # fmt: skip
    if kind == "segformer":
        config = t.SegformerConfig(
            num_labels=CLASSES, depths=[1] * 4, hidden_sizes=[8, 16, 24, 32], decoder_hidden_size=16
        )
        return t.SegformerForSemanticSegmentation(config)
    if kind == "upernet":
        stages = ["stage1", "stage2", "stage3", "stage4"]
        backbone = t.ConvNextConfig(depths=[1] * 4, hidden_sizes=[8, 16, 24, 32], out_features=stages)
        config = t.UperNetConfig(
            backbone_config=backbone, num_labels=CLASSES, hidden_size=16, auxiliary_in_channels=24, auxiliary_channels=8
        )
        return t.UperNetForSemanticSegmentation(config)
    if kind == "mobilenet_v2":
        return t.MobileNetV2ForSemanticSegmentation(t.MobileNetV2Config(num_labels=CLASSES, depth_multiplier=0.35))
    if kind == "beit":
        config = t.BeitConfig(
            **vit, num_labels=CLASSES, image_size=64, patch_size=8, out_indices=[1, 2, 3, 4],
            use_relative_position_bias=True,
        )  # fmt: skip
        return t.BeitForSemanticSegmentation(config)
    if kind == "dpt":
        config = t.DPTConfig(
            **vit, num_labels=CLASSES, image_size=64, patch_size=16, backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 16, 24, 32], fusion_hidden_size=16, is_hybrid=False,
        )  # fmt: skip
        return t.DPTForSemanticSegmentation(config)
    if kind == "maskformer":
        decoder = t.DetrConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=9,
        )  # fmt: skip
        config = t.MaskFormerConfig(
            backbone_config=swin(),
            decoder_config=decoder,
            num_labels=CLASSES,
            fpn_feature_size=32,
            mask_feature_size=32,
        )
        return t.MaskFormerForInstanceSegmentation(config)
    if kind == "mask2former":
        config = t.Mask2FormerConfig(backbone_config=swin(), feature_size=32, mask_feature_size=32, **queries)
        return t.Mask2FormerForUniversalSegmentation(config)
    config = t.OneFormerConfig(backbone_config=swin(), conv_dim=32, mask_dim=32, **queries)
    return t.OneFormerForUniversalSegmentation(config)


PROCESSORS = {
    "segformer": "SegformerImageProcessor", "beit": "BeitImageProcessor", "dpt": "DPTImageProcessor",
    "mobilenet_v2": "MobileNetV2ImageProcessor", "upernet": "SegformerImageProcessor",
    "maskformer": "MaskFormerImageProcessor", "mask2former": "Mask2FormerImageProcessor",
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PROCESSORS)
def test_transformers(kind, size, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    network = lively(hf_network(kind))
    network.save_pretrained(tmp_path)
    side = 64 if kind in ("beit", "dpt") else None
    processor = getattr(transformers, PROCESSORS[kind])(
        do_resize=False, do_center_crop=False, do_pad=False, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(tmp_path)
    image = pixels(size)
    fed = image.float() / 255
    if side:  # resized before the processor, in floats as we do, because its own resizing rounds to 8 bits
        fed = functional.interpolate(fed[None], size=(side, side), mode="bilinear", align_corners=False)[0]
    inputs = processor(images=[fed.numpy()], do_rescale=False, return_tensors="pt", input_data_format="channels_first")
    with torch.no_grad():
        found = network(pixel_values=inputs["pixel_values"])
    model = segprox.load_model(f"hf:{tmp_path}")
    ours = model(image[None].float() / 255)
    if hasattr(found, "logits"):
        theirs = functional.interpolate(found.logits, size=size, mode="bilinear", align_corners=False)
        assert_same(ours, theirs)
    else:
        theirs = processor.post_process_semantic_segmentation(found, target_sizes=[size])[0]
        assert len(theirs.unique()) > 1
        assert (ours.argmax(1)[0] == theirs).float().mean() > 0.999
    assert len(model.class_names) == CLASSES


def test_oneformer_is_told_the_task(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    network = lively(hf_network("oneformer"))
    network.save_pretrained(tmp_path)
    words = ["<|startoftext|>", "<|endoftext|>", *"the task is semantic".replace(" ", ""), *"aceghikmnst"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*words, *(f"{c}</w>" for c in "ekscthiamn")]))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokens = transformers.CLIPTokenizer.from_pretrained(tmp_path)(
        "the task is semantic", padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    )["input_ids"]
    images = pixels((64, 96))[None].float() / 255
    with torch.no_grad():
        found = network(pixel_values=(images - MEAN) / STD, task_inputs=tokens)
    classes = found.class_queries_logits.softmax(-1)[..., :-1]
    scores = torch.einsum("bqc,bqhw->bchw", classes, found.masks_queries_logits.sigmoid())
    theirs = functional.interpolate(scores, size=(64, 96), mode="bilinear", align_corners=False)
    assert_same(segprox.load_model(f"hf:{tmp_path}")(images), theirs)


def test_a_backbone_without_a_head_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    network = hf_network("segformer")
    network.segformer.save_pretrained(tmp_path)
    assert isinstance(network.segformer, transformers.SegformerModel)
    with pytest.raises(SegproxError, match="not trained for segmentation"):
        segprox.load_model(f"hf:{tmp_path}")


def test_transformers_names_what_it_cannot_find(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(SegproxError, match=r"hf:.*nowhere: there is no such folder"):
        segprox.load_model(f"hf:{tmp_path / 'nowhere'}")


def test_the_hub_is_not_asked_for_a_mistyped_folder(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: asked.append(name) or 1 / 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "segformer").mkdir(parents=True)
    with pytest.raises(SegproxError, match="hf:models/no-such: the folder models has no folder no-such"):
        segprox.load_model("hf:models/no-such")
    assert asked == []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: f"cache/{name}/{file}")
    for name in ("models/no-such", "others/no-such", "no-such"):  # downloaded before, or not here
        with pytest.raises(SegproxError, match="is no folder here, and cannot be loaded"):
            segprox.load_model(f"hf:{name}")
    assert asked == ["models/no-such", "others/no-such", "no-such"]


# --- mmsegmentation

MMSEG_CONFIG = """
norm = dict(type="SyncBN", requires_grad=True)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor", mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb={flip},
        pad_val=0, seg_pad_val=255),
    pretrained="open-mmlab://resnet18_v1c",
    backbone=dict(
        type="ResNetV1c", depth=18, num_stages=4, out_indices=(0, 1, 2, 3), dilations=(1, 1, 2, 4),
        strides=(1, 2, 1, 1), norm_cfg=norm, norm_eval=False, style="pytorch", base_channels=8, stem_channels=8),
    decode_head=dict(
        type="FCNHead", in_channels=64, in_index=3, channels=8, num_convs=1, num_classes=7, norm_cfg=norm,
        align_corners=False, loss_decode=dict(type="CrossEntropyLoss")),
    auxiliary_head=dict(
        type="FCNHead", in_channels=32, in_index=2, channels=8, num_convs=1, num_classes=7, norm_cfg=norm,
        align_corners=False, loss_decode=dict(type="CrossEntropyLoss")),
    train_cfg=dict(), test_cfg=dict(mode="slide", crop_size=(32, 32), stride=(16, 16)))
"""


@pytest.fixture
def mmseg_files(tmp_path):
    """A configuration, its model with the library's preprocessor, and a checkpoint as its runner writes it."""
    pytest.importorskip("mmseg")
    from mmengine.config import Config
    from mmengine.logging import MessageHub
    from mmengine.registry import init_default_scope
    from mmseg.models import build_segmentor  # noqa: F401  # registers the models
    from mmseg.registry import MODELS

    def make(flip=True):
        config = tmp_path / "net.py"
        config.write_text(MMSEG_CONFIG.format(flip=flip))
        init_default_scope("mmseg")
        content = Config.fromfile(config).model
        network = lively(MODELS.build(mmseg._for_inference(content)))
        hub = MessageHub("runner")
        hub.update_scalar("train/loss", np.float64(0.5))
        checkpoint = tmp_path / "iter_100.pth"
        meta = {"epoch": 0, "iter": 100, "seed": 3, "cfg": "text", "dataset_meta": {"classes": tuple("abcdefg")}}
        torch.save({"meta": meta, "state_dict": network.state_dict(), "message_hub": hub.state_dict()}, checkpoint)
        return config, checkpoint, network

    return make


def mmseg_answer(network, image, **about):
    """What the library itself makes of an 8-bit image `[3, H, W]`: a sample with logits."""
    from mmseg.structures import SegDataSample

    size = tuple(image.shape[1:])
    sample = SegDataSample(metainfo={"img_shape": size, "ori_shape": size, "img_path": ""} | about)
    with torch.no_grad():  # blue first, as it reads files
        return network.test_step({"inputs": [image.flip(0)], "data_samples": [sample]})[0]


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_mmseg(mmseg_files, size, flip):
    config, checkpoint, network = mmseg_files(flip)
    image = pixels(size)
    network.test_cfg = network.test_cfg.__class__(mode="whole")
    model = segprox.load_model(f"mmseg:{config}?checkpoint={checkpoint}&window=whole")
    assert_same(model(image[None].float() / 255), mmseg_answer(network, image).seg_logits.data[None])
    assert model.class_names == tuple("abcdefg")


@pytest.mark.parametrize("size", [*SIZES, (20, 70), (20, 20)])
def test_mmseg_by_windows_as_its_configuration_says(mmseg_files, size):
    config, checkpoint, network = mmseg_files()
    model = segprox.load_model(f"mmseg:{config}?checkpoint={checkpoint}")
    assert (model.window, model.stride) == ((32, 32), (16, 16))
    image = pixels(size)
    ours, theirs = model(image[None].float() / 255), mmseg_answer(network, image).seg_logits.data[None]
    assert (ours - theirs).abs().max() <= 1e-5 * (theirs.max() - theirs.min())
    other = segprox.load_model(f"mmseg:{config}?checkpoint={checkpoint}&window=24x40&stride=20")
    network.test_cfg = network.test_cfg.__class__(mode="slide", crop_size=(24, 40), stride=(20, 20))
    ours, theirs = other(image[None].float() / 255), mmseg_answer(network, image).seg_logits.data[None]
    assert (ours - theirs).abs().max() <= 1e-5 * (theirs.max() - theirs.min())


def test_mmseg_at_several_scales_and_mirrored(mmseg_files):
    from mmseg.models import SegTTAModel

    config, checkpoint, network = mmseg_files()
    image, size = pixels((40, 60)), (40, 60)
    samples = []
    for seen in ((20, 30), (40, 60), (60, 90)):  # scaled in floats, because the library's files have 8 bits
        scaled = functional.interpolate(image[None].float(), size=seen, mode="bilinear", align_corners=False)[0]
        for flip in (False, True):
            about = {"ori_shape": size, "flip": flip, "flip_direction": "horizontal"}
            samples.append(mmseg_answer(network, scaled.flip(2) if flip else scaled, **about))
    merged = SegTTAModel(module=network).merge_preds([samples])[0]
    model = segprox.load_model(f"mmseg:{config}?checkpoint={checkpoint}&tta=0.5,1,1.5,flip")
    ours = model(image[None].float() / 255)
    theirs = torch.stack([sample.seg_logits.data.softmax(0) for sample in samples]).mean(0)
    assert (ours.exp()[0] - theirs).abs().max() <= 1e-5
    assert (ours.argmax(1) == merged.pred_sem_seg.data).float().mean() > 0.999


def test_the_papers_models_are_in_the_library():
    pytest.importorskip("mmseg")
    for name, preset in mmseg.PRESETS.items():
        config = mmseg._read_config(preset.config)
        assert config.model.decode_head.get("num_classes", 0) or config.model.decode_head[-1].num_classes
        assert preset.checkpoint.startswith(preset.config.split("-")[0].split("_4xb")[0].split("_8xb")[0]), name


def test_a_model_of_the_paper(tmp_path, monkeypatch):
    pytest.importorskip("mmseg")
    preset = mmseg.PRESETS["segformer-mit-b0-cityscapes"]
    monkeypatch.setenv("SEGPROX_CHECKPOINTS", str(tmp_path))
    with pytest.raises(SegproxError, match=rf"{preset.checkpoint} are expected in {tmp_path}.*{preset.url}"):
        segprox.load_model("mmseg:segformer-mit-b0-cityscapes")
    untrained = segprox.load_model("mmseg:segformer-mit-b0-cityscapes?checkpoint=random")
    weights = untrained.model.segmentor.state_dict()
    torch.save(
        {"meta": {"CLASSES": ("road",), "PALETTE": [[1, 2, 3]]}, "state_dict": weights}, tmp_path / preset.checkpoint
    )
    loaded = segprox.load_model("mmseg:segformer-mit-b0-cityscapes")
    images = torch.rand(1, 3, 50, 70)
    assert torch.equal(loaded(images), untrained(images))
    assert loaded(images).shape == (1, 19, 50, 70)
    assert loaded.window is None  # the paper uses whole images; the configuration itself says otherwise
    assert segprox.load_model(f"mmseg:{preset.config}?checkpoint=random").window == (1024, 1024)


def test_mmseg_names_what_it_does_not_know(tmp_path):
    pytest.importorskip("mmseg")
    with pytest.raises(SegproxError, match=r"no configuration 'pspnet_nope'.*for example: .*pspnet_"):
        segprox.load_model("mmseg:pspnet_nope")
    with pytest.raises(SegproxError, match=r"there is no configuration .*missing.py"):
        segprox.load_model(f"mmseg:{tmp_path / 'missing.py'}")
    (tmp_path / "data.py").write_text("x = 1\n")
    with pytest.raises(SegproxError, match="no entry `model`"):
        segprox.load_model(f"mmseg:{tmp_path / 'data.py'}")


# --- torchvision, smp


def test_torchvision(tmp_path):
    models = pytest.importorskip("torchvision.models")
    network = lively(models.get_model("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=5))
    torch.save(network.state_dict(), tmp_path / "net.pth")
    model = segprox.load_model("torchvision:lraspp_mobilenet_v3_large", checkpoint=tmp_path / "net.pth", num_classes=5)
    for size in SIZES:
        images = pixels(size)[None].float() / 255
        with torch.no_grad():
            assert_same(model(images), network((images - MEAN) / STD)["out"])
    with pytest.raises(SegproxError, match="known are: deeplabv3_mobilenet_v3_large"):
        segprox.load_model("torchvision:resnet50?checkpoint=random")
    with pytest.raises(SegproxError, match="needs weights"):
        segprox.load_model("torchvision:lraspp_mobilenet_v3_large")


@pytest.mark.parametrize("saved", ["weights", "folder"])
@pytest.mark.parametrize("classes", [1, 5])
def test_smp(tmp_path, classes, saved):
    smp = pytest.importorskip("segmentation_models_pytorch")
    network = lively(smp.Unet("resnet18", encoder_weights=None, classes=classes, decoder_channels=(32, 16, 16, 8, 8)))
    name = f"smp:{tmp_path}"
    if saved == "weights":
        network = lively(smp.Unet("resnet18", encoder_weights=None, classes=classes))
        torch.save({"epoch": 3, "model_state_dict": network.state_dict()}, tmp_path / "net.pt")
        name = f"smp:Unet/resnet18?checkpoint={tmp_path / 'net.pt'}&num_classes={classes}"
    else:
        network.save_pretrained(tmp_path)
    model = segprox.load_model(name)
    for height, width in SIZES:
        images = pixels((height, width))[None].float() / 255
        padded = functional.pad((images - MEAN) / STD, (0, -width % 32, 0, -height % 32))
        with torch.no_grad():
            theirs = network(padded)[:, :, :height, :width]
        ours = model(images)
        assert_same(ours if classes > 1 else ours[:, 1:] - ours[:, :1], theirs)


def test_smp_takes_logits_before_an_activation_and_timms_normalisation(tmp_path):
    smp = pytest.importorskip("segmentation_models_pytorch")
    network = lively(smp.Unet("resnet18", encoder_weights=None, classes=3, activation="softmax2d"))
    network.save_pretrained(tmp_path)
    images = torch.rand(1, 3, 64, 64)
    logits = segprox.load_model(f"smp:{tmp_path}")(images)
    with torch.no_grad():
        assert_same(logits.softmax(1), network((images - MEAN) / STD))
    import timm

    encoder = "mobilenetv3_small_050"
    model = segprox.load_model(f"smp:FPN/tu-{encoder}?checkpoint=random&num_classes=3")
    assert model.mean.flatten().tolist() == pytest.approx(timm.models.get_pretrained_cfg(encoder).mean)


def test_smp_names_what_it_does_not_know():
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(SegproxError, match=r"neither a folder .* nor ARCHITECTURE/ENCODER"):
        segprox.load_model("smp:Unet")
    with pytest.raises(SegproxError, match="cannot be built"):
        segprox.load_model("smp:Unet/nope?checkpoint=random")


# --- DDC-AT


def test_ddcat_has_the_published_layout(tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = lively(ddcat.DeepLabV3(21))
    weights = network.state_dict()
    # names and shapes of the published checkpoints
    for name, shape in {
        "layer0.0.weight": (64, 3, 3, 3), "layer0.6.weight": (128, 64, 3, 3), "layer0.7.running_mean": (128,),
        "layer1.0.conv1.weight": (64, 128, 1, 1), "layer1.0.downsample.0.weight": (256, 128, 1, 1),
        "layer3.5.bn3.bias": (1024,), "layer4.2.conv2.weight": (512, 512, 3, 3),
        "aspp.convs.0.0.weight": (256, 2048, 1, 1), "aspp.convs.3.0.weight": (256, 2048, 3, 3),
        "aspp.convs.4.1.weight": (256, 2048, 1, 1), "cls1.0.weight": (256, 1280, 1, 1), "cls1.4.bias": (21,),
    }.items():  # fmt: skip
        assert weights[name].shape == shape, name
    trained = {f"module.{key}": value for key, value in weights.items()}
    for name, channels in {"cls2": 21, "mask1": 2, "aux_cls1": 21}.items():  # used in training only
        trained[f"module.{name}.4.bias"] = torch.zeros(channels)
    path = tmp_path / ddcat.PRESETS["voc"].checkpoint
    path.parent.mkdir(parents=True)
    torch.save({"epoch": 50, "state_dict": trained, "optimizer": {"state": {}, "param_groups": []}}, path)
    monkeypatch.setenv("SEGPROX_CHECKPOINTS", str(tmp_path))
    model = segprox.load_model("ddcat:voc")
    images = pixels((33, 41))[None].float() / 255
    with torch.no_grad():
        assert_same(model(images), network((images - MEAN) / STD))
    with pytest.raises(SegproxError, match=r"train_epoch_400.pth are expected in"):
        segprox.load_model("ddcat:cityscapes")
    with pytest.raises(SegproxError, match="known are: ddcat:voc, ddcat:cityscapes"):
        segprox.load_model("ddcat:camvid")


def test_ddcat_has_stride_eight():
    """The third and fourth layers dilate instead of halving."""
    network = ddcat.DeepLabV3(3).eval()
    features = nn.Sequential(network.layer0, network.layer1, network.layer2, network.layer3, network.layer4)
    assert features(torch.rand(1, 3, 65, 97)).shape == (1, 2048, 9, 13)


# --- Python


def net():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 1)


def test_python_module_and_file(tmp_path):
    images = torch.rand(1, 3, 8, 8)
    model = segprox.load_model("python:tests.test_sources:net?mean=0.5,0.5,0.5&std=0.25,0.25,0.25")
    assert_same(model(images), net()((images - 0.5) / 0.25).detach())
    file = tmp_path / "mine.py"
    file.write_text(
        "import segprox, torch\ndef make():\n    return segprox.Segmenter(torch.nn.Conv2d(3, 4, 1), bgr=True)\n"
    )
    torch.save(net().state_dict(), tmp_path / "w.pt")
    model = segprox.load_model(f"python:{file}:make", checkpoint=tmp_path / "w.pt")
    assert_same(model(images), net()(images.flip(1)).detach())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:net", "should be python:package.module:factory"),
        ("python:no.such.module:net", "no.such.module cannot be imported"),
        ("python:no-such-file.py:net", "there is no file no-such-file.py"),
        ("python:tests.test_sources:SIZES", "has no function 'SIZES'"),
        ("python:tests.test_sources:pixels_of_nothing", "has no function"),
        ("python:builtins:dict", "should return a torch.nn.Module but returned dict"),
        ("hf:", "hf: which one"),
        ("nowhere:x", "there is no model 'nowhere:x'"),
        ("demo-standard?colour=red", "a model has no option 'colour'"),
        ("demo-standard?precision=float8", "precision of a model cannot be 'float8'"),
        ("demo-standard?device=moon", "device 'moon' cannot be used"),
        ("demo-standard?device", "option=value"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(SegproxError, match=message):
        segprox.load_model(name)


def test_a_missing_or_broken_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SegproxError, match=r"not installed: pip install 'segprox\[hf\]'"):
        require("no_such_library", "hf")
    broken = ModuleType("broken_finder")
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(RuntimeError(name))
    monkeypatch.setattr("segprox.optional.import_module", lambda _: (_ for _ in ()).throw(RuntimeError("no op")))
    with pytest.raises(SegproxError, match=r"installed but cannot be imported \(no op\)"):
        require("torchvision", "torchvision")


def test_every_source_has_an_example_of_its_own():
    for name, source in SOURCES.items():
        assert source.example.startswith(f"{name}:")
