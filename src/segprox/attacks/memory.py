"""What an attack holds in memory beside the network's own tensors."""

STATE_BYTES = 246  # per pixel, of ALMA prox beside two maps of logits: images, multipliers, metric, masks
FLOAT = 4


def state_bytes(height: int, width: int, num_classes: int) -> int:
    """The bytes that an attack on one image holds: two maps of logits in float32, and its state.

    Example:
        >>> state_bytes(1024, 2048, 19) // 2**20
        796
    """
    return height * width * (2 * FLOAT * num_classes + STATE_BYTES)
