function bar(kind, share) {
  const inner = make("div", { class: kind });
  inner.style.width = percent(share || 0);
  return make("div", { class: "track" }, inner);
}

const isCritical = (run, k) => DATA.critical.includes(run.classes[k]);
/** Critical classes come first, in the order they were given. */
const rank = (run, k) => (isCritical(run, k) ? DATA.critical.indexOf(run.classes[k]) : DATA.critical.length);

function classRow(run, k) {
  const [before, after] = run.iou.map((values) => values[k]);
  const swatch = make("span", { class: "swatch" });
  swatch.style.background = colour(run.palette[k]);
  const numbers = make("b", {}, `${percent(before)} → ${percent(after)}`);
  const tracks = make("div", { class: "tracks" }, bar("before", before), bar("after", after));
  const name = make("span", {}, run.classes[k], ...(isCritical(run, k) ? [make("b", { class: "critical" }, "critical")] : []));
  return make("li", {}, swatch, name, numbers, tracks);
}

function drawClasses() {
  const run = RUNS[Number(byId("class-run").value)];
  const [before, after] = run.iou;
  // Classes that neither occur nor are predicted have nothing to show.
  const shown = [...before.keys()].filter((k) => before[k] !== null || after[k] !== null);
  const value = { order: (k) => k, lost: (k) => after[k] - before[k], left: (k) => -after[k] }[byId("class-sort").value];
  shown.sort((a, b) => rank(run, a) - rank(run, b) || value(a) - value(b));
  byId("bars").replaceChildren(...shown.map((k) => classRow(run, k)));
}

function startClasses() {
  const known = [...RUNS.keys()].filter((i) => RUNS[i].records.length).sort((a, b) => RUNS[b].strongest - RUNS[a].strongest);
  byId("classes").hidden = !known.length;
  if (!known.length) return;
  options(byId("class-run"), known.map((i) => [i, `${setting(RUNS[i])} · ${RUNS[i].attack}`]));
  for (const id of ["class-run", "class-sort"]) byId(id).addEventListener("change", drawClasses);
  drawClasses();
}
