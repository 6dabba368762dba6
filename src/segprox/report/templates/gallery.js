const PAGE = 48; // tiles made at a time: thousands at once would freeze the page
const ENTRIES = RUNS.flatMap((run, i) => run.records.map((record, j) => ({ id: `${i}-${j}`, run, record })));
// What a tile has to say besides its name; all else is the same everywhere.
const VARYING = ["model", "dataset", "attack", "goal", "norm"].filter((field) => unique(RUNS.map((run) => run[field])).length > 1);
const gallery = { shown: [], made: 0 };

/** What an image counts as; one that was not broken is larger than all. */
const counted = ({ record, run }) => (record.success && record.size !== null ? record.size : run.norm === "linf" ? 255 : Number.MAX_VALUE);
/** Sizes in different norms are not compared: linf comes first. */
const byNorm = (a, b) => (b.run.norm === "linf") - (a.run.norm === "linf") || a.run.norm.localeCompare(b.run.norm);
const byName = (a, b) => a.record.image.localeCompare(b.record.image, undefined, { numeric: true });
const ORDERS = {
  image: byName,
  small: (a, b) => byNorm(a, b) || counted(a) - counted(b) || byName(a, b),
  large: (a, b) => byNorm(a, b) || counted(b) - counted(a) || byName(a, b),
  low: (a, b) => a.record.apsr - b.record.apsr || byName(a, b),
  high: (a, b) => b.record.apsr - a.record.apsr || byName(a, b),
};
const OUTCOMES = {
  "": () => true,
  broken: (record) => record.success,
  held: (record) => !record.success,
  undone: (record) => record.success && !record.rounded,
};

function chosen() {
  const text = byId("find").value.trim().toLowerCase();
  const [where, attack] = [byId("by-setting").value, byId("by-attack").value];
  const fits = OUTCOMES[byId("by-outcome").value];
  return ENTRIES.filter(({ run, record }) =>
    (!text || record.image.toLowerCase().includes(text)) && (!where || setting(run) === where) &&
    (!attack || run.attack === attack) && fits(record)).sort(ORDERS[byId("sort-by").value]);
}

function tile(entry, at) {
  const { run, record } = entry;
  const source = thumbnail(entry);
  const picture = source ? make("img", { src: source, alt: "", decoding: "async" }) : make("span", { class: "blank" }, "no picture");
  const outcome = record.success ? `broken at ${withUnit(record.size, run.norm)}` : `not broken, APSR ${percent(record.apsr, 0)}`;
  const text = make("span", { class: "text" },
    make("span", { class: "name" }, record.image),
    ...VARYING.map((field) => make("span", { class: "sub" }, run[field])),
    make("span", { class: record.success ? "broken" : "held" }, outcome));
  const button = make("button", { type: "button", class: "tile", title: `${record.image}\n${setting(run)}\n${run.attack}` }, picture, text);
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
  options(byId("by-attack"), all(RUNS.map((run) => run.attack)));
  for (const id of ["by-setting", "by-attack", "by-outcome", "sort-by"]) byId(id).addEventListener("change", refresh);
  byId("find").addEventListener("input", refresh);
  byId("more").addEventListener("click", addTiles);
  // The button is for keyboards; whoever scrolls to it gets more without a click.
  new IntersectionObserver((seen) => seen.some((entry) => entry.isIntersecting) && addTiles(), { rootMargin: "600px" }).observe(byId("more"));
  refresh();
}
