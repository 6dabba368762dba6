// Tiles made at a time: thousands at once would freeze the page, and on a phone nobody would scroll past them.
const PAGE = matchMedia("(max-width: 700px)").matches ? 8 : 24;
const ENTRIES = RUNS.flatMap((run, i) => run.records.map((record, j) => ({ id: `${i}-${j}`, run, record })));
// What a tile has to say besides its name; all else is the same everywhere.
const VARYING = ["model", "dataset", "attack", "goal", "norm"].filter((field) => unique(RUNS.map((run) => run[field])).length > 1);
const gallery = { shown: [], made: 0 };
const STRONGEST = "\u0000strongest"; // no attack is called this

/** What an image counts as; one that was not broken is larger than all. */
const counted = ({ record, run }) => (record.success && record.size !== null ? record.size : WHOLE[run.unit] || Number.MAX_VALUE);
/** Sizes in different norms are not compared: linf comes first. */
const byNorm = (a, b) => (b.run.norm === "linf") - (a.run.norm === "linf") || a.run.norm.localeCompare(b.run.norm);
const byApsr = (a, b) => b.record.apsr - a.record.apsr;
const byName = (a, b) => a.record.image.localeCompare(b.record.image, undefined, { numeric: true });
const ORDERS = {
  image: byName,
  worst: (a, b) => byNorm(a, b) || counted(a) - counted(b) || byApsr(a, b) || byName(a, b),
  best: (a, b) => byNorm(a, b) || counted(b) - counted(a) || byApsr(b, a) || byName(a, b),
  low: (a, b) => byApsr(b, a) || byName(a, b),
  high: (a, b) => byApsr(a, b) || byName(a, b),
};
const OUTCOMES = {
  "": () => true,
  broken: (record) => record.success,
  unbroken: (record) => !record.success,
  undone: (record) => record.success && record.rounded === false,
};

function chosen() {
  const text = byId("find").value.trim().toLowerCase();
  const [where, attack] = [byId("by-setting").value, byId("by-attack").value];
  const fits = OUTCOMES[byId("by-outcome").value];
  return ENTRIES.filter(({ run, record }) =>
    (!text || record.image.toLowerCase().includes(text)) && (!where || setting(run) === where) &&
    (!attack || (attack === STRONGEST ? run.strongest : run.attack === attack)) && fits(record)).sort(ORDERS[byId("sort-by").value]);
}

/** What became of an image; one that is not broken need not be unharmed. */
function outcome({ run, record }) {
  const at = withUnit(record.size, run.unit);
  const draws = record.draws === null ? [] : [`in ${record.draws} draws`];
  if (record.success) return [run.epsilon === null ? `broken at ${at}` : `broken within ${withUnit(run.epsilon, run.unit)}`, ...draws];
  const what = run.goal.startsWith("untargeted") ? "wrong" : "as wanted";
  return ["not broken", `${percent(record.apsr)} ${what} at ${at}`, `${percent(record.accuracy)} right`, ...draws];
}

/** The perturbed image, which looks like any other, above what the model sees in it. */
function tilePicture(entry) {
  const blank = (text) => make("span", { class: "blank" }, text);
  const sources = pictures(entry);
  if (!sources) return blank("no picture");
  const [image, seen] = ["adversarial", "prediction"].map((part) => make("img", { src: sources[part], alt: "", decoding: "async" }));
  seen.classList.add("map");
  const both = make("span", { class: "pictures" }, image, seen);
  image.addEventListener("error", () => both.replaceWith(blank("its file is missing")));
  return both;
}

function tile(entry, at) {
  const { run, record } = entry;
  const text = make("span", { class: "text" },
    make("span", { class: "name" }, record.image),
    ...VARYING.map((field) => make("span", { class: "sub" }, run[field])),
    ...outcome(entry).map((line) => make("span", { class: record.success ? "broken" : "unbroken" }, line)));
  const button = make("button", { type: "button", class: "tile", title: `${record.image}\n${setting(run)}\n${run.attack}` }, tilePicture(entry), text);
  button.addEventListener("click", () => openViewer(gallery.shown, at));
  return button;
}

function addTiles() {
  const until = Math.min(gallery.shown.length, gallery.made + PAGE);
  const tiles = gallery.shown.slice(gallery.made, until).map((entry, i) => tile(entry, gallery.made + i));
  byId("grid").append(...tiles);
  gallery.made = until;
  byId("more").hidden = until >= gallery.shown.length;
}

function refresh() {
  gallery.shown = chosen();
  gallery.made = 0;
  byId("grid").replaceChildren();
  byId("found").textContent = `${gallery.shown.length} of ${ENTRIES.length}`;
  addTiles();
}

function startGallery() {
  byId("images").hidden = !ENTRIES.length;
  const all = (values) => [["", "all"], ...unique(values).map((value) => [value, value])];
  options(byId("by-setting"), all(RUNS.map(setting)));
  options(byId("by-attack"), [[STRONGEST, "the strongest"], ...all(RUNS.map((run) => run.attack))]);
  for (const id of ["by-setting", "by-attack", "by-outcome", "sort-by"]) byId(id).addEventListener("change", refresh);
  byId("find").addEventListener("input", refresh);
  byId("more").addEventListener("click", addTiles);
  refresh();
}
