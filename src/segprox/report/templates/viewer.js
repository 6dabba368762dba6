const viewer = { list: [], at: 0, entry: null, sources: null };
const VOID = 255;
const PARTS = { image: "Before", adversarial: "Perturbed", clean: "Before", prediction: "After" };

/** The place of a record in a link: `#view=run/image`. */
function place(entry) {
  return `#view=${encodeURIComponent(entry.run.id)}/${encodeURIComponent(entry.record.image)}`;
}

function entryAt(hash) {
  const found = /^#view=([^/]*)\/(.*)$/.exec(hash);
  if (!found) return null;
  try {
    const [id, image] = found.slice(1).map(decodeURIComponent);
    return ENTRIES.find((entry) => entry.run.id === id && entry.record.image === image) || null;
  } catch {
    return null; // not a link of ours
  }
}

/** Changes the address without a jump and without filling the history. */
function setHash(hash) {
  history.replaceState(null, "", hash || location.pathname + location.search);
}

function facts(entry) {
  const { record, run } = entry;
  const pairs = [
    ["Outcome", record.success ? "broken" : "not broken", record.success ? "broken" : "unbroken"],
    ...(run.epsilon === null ? [] : [["Epsilon", withUnit(run.epsilon, run.unit)]]),
    ...(["linf", "l2"].includes(run.norm) ? [] : [[`${run.norm} norm`, size(record.size)]]),
    ["Largest change", withUnit(record.linf, linfUnit(run))],
    ["l2 norm", size(record.l2)],
    ...(record.protected === null
      ? [["APSR", percent(record.apsr, 2)]]
      : [["Attacked pixels changed", percent(record.attacked, 2)], ["Protected pixels right", percent(record.protected, 2)]]),
    ...(record.draws === null ? [] : [["Broken draws", record.draws]]),
    ["Accuracy", `${percent(record.cleanAccuracy)} → ${percent(record.accuracy)}`],
    ...(record.rounded === null
      ? []
      : [[run.rounded === "8 bits" ? "In 8 bits" : "Rounded", `${record.rounded ? "broken" : "not broken"} at ${withUnit(record.roundedSize, run.unit)}`]]),
    ["Queries", `${record.forwards} + ${record.backwards}`],
    ["Seconds", record.seconds === null ? "–" : record.seconds.toFixed(1)],
    ["Pixels", `${record.width} × ${record.height}`],
    ["Image hash", record.hash.slice(0, 12)],
  ];
  return pairs.map(([name, text, kind]) => make("div", {}, make("dt", {}, name), make("dd", kind ? { class: kind } : {}, text)));
}

/** Addresses of the pictures of a record, by part. */
function pictures(entry) {
  return entry.record.pictures ? JSON.parse(byId(`p-${entry.id}`).textContent) : null;
}

function drawClassLegend(entry) {
  const items = entry.record.classes.map((k) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = colour(k === VOID ? DATA.void : entry.run.palette[k] || DATA.void);
    return make("li", {}, swatch, k === VOID ? "not counted" : entry.run.classes[k] || String(k));
  });
  byId("view-legend").replaceChildren(...items);
}

/** The largest change in [0, 1]; where nothing changed any number will do. */
const largestChange = () => (viewer.entry.record.linf || 0.5 * WHOLE[linfUnit(viewer.entry.run)]) / WHOLE[linfUnit(viewer.entry.run)];
const mostGain = () => Math.max(2, 2 / largestChange());

/** The stored picture is stretched to black and white at the largest change; a gain of 1 shows changes as they are. */
function setGain() {
  const largest = largestChange();
  const gain = mostGain() ** Number(byId("gain").value);
  for (const channel of byId("amplify").querySelectorAll("[slope]")) {
    channel.setAttribute("slope", 2 * gain * largest);
    channel.setAttribute("intercept", 0.5 - gain * largest);
  }
  byId("gain-value").textContent = `${gain < 10 ? gain.toFixed(1) : Math.round(gain)} times`;
}

/** As much as just reaches black and white. */
function resetGain() {
  byId("gain").value = Math.max(0, Math.log(0.5 / largestChange()) / Math.log(mostGain()));
  setGain();
}

function setPair() {
  const [before, after] = byId("pair").value.split(" ");
  for (const [id, part] of [["over", before], ["under", after]]) {
    byId(id).src = viewer.sources[part];
    byId(id).alt = byId(`${id}-name`).textContent = part === "label" ? byId("view-label").textContent : PARTS[part];
    byId(id).classList.toggle("map", ["label", "clean", "prediction"].includes(part));
  }
  setEdge();
}

function setEdge() {
  const at = Number(byId("at").value);
  byId("over").style.clipPath = `inset(0 ${100 - at}% 0 0)`;
  byId("edge").style.left = `${at}%`;
}

function view(entry) {
  viewer.entry = entry;
  viewer.sources = pictures(entry);
  const { run, record } = entry;
  const targeted = !run.goal.startsWith("untargeted");
  byId("view-name").textContent = record.image;
  byId("view-run").textContent = `${run.model} · ${run.dataset} · ${run.attack} · ${run.goal}`;
  byId("view-facts").replaceChildren(...facts(entry));
  byId("view-label").textContent = targeted ? "Target" : "Labels";
  byId("pair-label").textContent = targeted ? "target and prediction after" : "labels and prediction after";
  byId("view-pictures").hidden = !record.pictures;
  byId("view-note").hidden = record.pictures;
  if (record.pictures) {
    for (const image of byId("view-pictures").querySelectorAll("[data-part]")) image.src = viewer.sources[image.dataset.part];
    drawClassLegend(entry);
    resetGain();
    setPair();
  }
  setHash(place(entry));
}

/** Opens the viewer on one of a list, which arrow keys then walk through. */
function openViewer(list, at) {
  viewer.list = list;
  viewer.at = at;
  view(list[at]);
  if (!byId("viewer").open) byId("viewer").showModal();
  byId("view-body").scrollTop = 0;
}

function step(by) {
  const count = viewer.list.length;
  viewer.at = (viewer.at + by + count) % count;
  view(viewer.list[viewer.at]);
}

function openFromHash() {
  const entry = entryAt(location.hash);
  if (!entry) return;
  const listed = gallery.shown.includes(entry) ? gallery.shown : ENTRIES;
  openViewer(listed, listed.indexOf(entry));
}

function dragEdge(event) {
  if (event.type === "pointermove" && !event.buttons) return;
  const box = event.currentTarget.getBoundingClientRect();
  byId("at").value = (100 * (event.clientX - box.left)) / box.width;
  setEdge();
}

function startViewer() {
  const dialog = byId("viewer");
  byId("view-previous").addEventListener("click", () => step(-1));
  byId("view-next").addEventListener("click", () => step(1));
  byId("view-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => setHash(""));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
  dialog.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select") || event.altKey || event.ctrlKey || event.metaKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) step(by);
  });
  byId("gain").addEventListener("input", setGain);
  byId("at").addEventListener("input", setEdge);
  byId("pair").addEventListener("change", setPair);
  for (const kind of ["pointerdown", "pointermove"]) document.querySelector(".stack").addEventListener(kind, dragEdge);
  addEventListener("hashchange", openFromHash);
}
