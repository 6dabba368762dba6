const DASHES = ["", "9 4", "2 4", "12 4 2 4", "5 3", "14 6", "2 2", "9 3 2 3 2 3"];
const TICKS = [0.01, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 255]; // of linf
const ROUND = [-4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((factor) => Number(`${factor}e${power}`)));
const MARGIN = { top: 30, right: 18, bottom: 44, left: 50 };
const LINEAR_TO = 2; // 255ths: below, the mixed axis of linf is linear, and above, logarithmic
const NOTES = {
  broken: "Share of images that no change up to this size was found for. The lower a curve, the stronger the attack; the higher, the more robust the model.",
  accuracy: "Pixel accuracy when every image whose perturbation fits into epsilon is replaced by its perturbed version. Dots: attacks that were run with that epsilon.",
  miou: "Mean IoU, pooled over images, when every image whose perturbation fits into epsilon is replaced by its perturbed version. Dots: attacks that were run with that epsilon.",
  anytime: "What an attack has found after so many forward and backward passes per image: the median size, from when half of the images are broken. Lower is better, and further left is cheaper.",
};
const TITLES = { broken: "images not broken", accuracy: "pixel accuracy", miou: "mean IoU" };
const curves = { groups: [], hidden: new Set(), kind: "broken", axis: "mixed", at: null };

/** Everything worth comparing: attacks on one model, models under one attack. */
function curveGroups() {
  const drawn = RUNS.filter((run) => run.records.length);
  const collect = (title, key, name, kind) =>
    unique(drawn.map(key)).map((value) => {
      const runs = drawn.filter((run) => key(run) === value);
      const series = unique(runs.map((run) => run[name])).map((own) => {
        const some = runs.filter((run) => run[name] === own).sort((a, b) => a.epsilon - b.epsilon);
        return { run: some[0], runs: some, name: own, look: some[0].colours[kind] };
      });
      return { title: `${title}: ${value}`, unit: runs[0].unit, series };
    });
  const attacks = collect("Attacks", setting, "series", "attack");
  const underOne = (run) => setting({ ...run, model: run.series });
  const models = collect("Models", underOne, "model", "model").filter((group) => group.series.length > 1);
  return [...attacks, ...models];
}

/** Attacks that stay within an epsilon: a point for each, and nothing about smaller sizes. */
const isFixed = (entry) => entry.run.epsilon !== null;
const fits = (entry, kind) => !isFixed(entry) || kind === "accuracy" || kind === "miou";

/** Points [x, y] of a staircase, or of the epsilons that were tried. */
function points({ run, runs }, kind) {
  if (run.epsilon !== null) {
    const each = runs.map((own) => own.curves[kind]).map(([x, y]) => [[x[0], y[0]], [x[1], y[1]]]);
    return [each[0][0], ...each.map(([, last]) => last)].filter(([, value]) => value !== null);
  }
  const [x, y] = run.curves[kind] || [[], []];
  const known = x.map((value, i) => [value, y[i]]).filter(([at, value]) => at !== null && value !== null);
  return kind === "anytime" ? afterHalf(known, run.unit) : known;
}

/** Before half of the images are broken there is nothing to see; an attack that never gets there has a line at the top. */
function afterHalf(stairs, unit) {
  const whole = WHOLE[unit];
  const first = stairs.findIndex(([, y]) => !whole || y < whole);
  return first >= 0 || !stairs.length ? stairs.slice(Math.max(0, first)) : [[1, whole], stairs[stairs.length - 1]];
}

function valueAt(stairs, x) {
  let value = stairs.length && stairs[0][0] <= x ? stairs[0][1] : null;
  for (const [at, y] of stairs) {
    if (at > x) break;
    value = y;
  }
  return value;
}

/** An axis from numbers to [0, 1] and back, with its ticks. */
function makeAxis(kind, ticks, most, least, linear) {
  const shape = {
    linear: { to: (x) => x, from: (t) => t },
    log: { to: (x) => Math.log(Math.max(x, least) / least), from: (t) => least * Math.exp(t) },
    mixed: {
      to: (x) => (x <= linear ? x / linear : 1 + Math.log(x / linear)),
      from: (t) => (t <= 1 ? t * linear : linear * Math.exp(t - 1)),
    },
  }[kind];
  const end = shape.to(most);
  return { ticks, to: (x) => Math.min(1, shape.to(x) / end), from: (t) => shape.from(t * end) };
}

const SHARES = { ...makeAxis("linear", [0, 0.25, 0.5, 0.75, 1], 1), text: (share) => `${share * 100}%`, value: (share) => percent(share) };

/** For sizes: up to the next round number, so that curves end inside. */
function sizeAxis(values, unit) {
  const steps = unit === "linf" ? TICKS : ROUND;
  const known = values.filter((x) => x > 0);
  const largest = Math.max(...known, unit === "linf" ? 0.5 : 1e-3);
  const least = steps.findLast((x) => x <= Math.min(...known, largest / 4)) || steps[0];
  const linear = unit === "linf" ? LINEAR_TO : least;
  let most = steps.find((x) => x >= largest * 1.02) || steps[steps.length - 1];
  if (curves.axis === "linear") most = unit === "linf" ? Math.min(255, largest * 1.08) : largest * 1.08;
  if (curves.axis === "mixed") most = Math.max(most, 2 * linear);
  const axis = makeAxis(curves.axis, sizeTicks(steps, most, least, unit), most, least, linear);
  return { ...axis, title: unitName(unit), text: String, value: (x) => withUnit(x, unit) };
}

function sizeTicks(steps, most, least, unit) {
  if (curves.axis === "log") return steps.filter((x) => x >= least && x <= most);
  if (curves.axis === "mixed") return [0, ...steps.filter((x) => x >= (unit === "linf" ? 0.5 : least) && x <= most)];
  const step = ROUND.find((s) => most / s <= 8);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}

function queryAxis(values) {
  const later = values.filter((x) => x > 1); // where lines at the top begin
  const [least, most] = [(later.length ? Math.min(...later) : 1) / 1.2, Math.max(...values, 2) * 1.05];
  const axis = makeAxis("log", ROUND.filter((x) => x >= least && x <= most), most, least);
  return { ...axis, title: "forwards + backwards per image", text: String, value: (x) => `${Math.round(x)} queries` };
}

function chosenGroup() {
  return curves.groups[Number(byId("curve-group").value)];
}

function visibleLines() {
  const group = chosenGroup();
  const shown = group ? group.series.filter((entry) => !curves.hidden.has(entry.name) && fits(entry, curves.kind)) : [];
  return shown.map((entry) => ({ ...entry, stairs: points(entry, curves.kind) }));
}

/** Geometry of the chart at its present width. */
function frame(lines) {
  const width = Math.max(280, byId("chart").clientWidth);
  const height = Math.max(240, Math.min(440, width * 0.5));
  const unit = chosenGroup() ? chosenGroup().unit : "linf";
  const [xs, ys] = [0, 1].map((i) => lines.flatMap((line) => line.stairs.map((point) => point[i])));
  const anytime = curves.kind === "anytime";
  const across = anytime ? queryAxis(xs) : sizeAxis(xs, unit);
  const along = anytime ? sizeAxis(ys, unit) : SHARES;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  return {
    width, height, across, along,
    x: (value) => MARGIN.left + across.to(value) * inner.width,
    y: (value) => MARGIN.top + (1 - along.to(value)) * inner.height,
    top: MARGIN.top, bottom: MARGIN.top + inner.height,
    back: (pixel) => across.from(Math.min(1, Math.max(0, (pixel - MARGIN.left) / inner.width))),
  };
}

function drawAxes(svg, box) {
  let above = Infinity; // labels must not run into each other
  for (const value of box.along.ticks) {
    const y = box.y(value);
    svg.append(draw("line", { x1: MARGIN.left, x2: box.width - MARGIN.right, y1: y, y2: y, class: value ? "gridline" : "axis" }));
    if (y > above) continue;
    above = y - 14;
    svg.append(draw("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, box.along.text(value)));
  }
  let free = -Infinity; // nor on a phone
  for (const value of box.across.ticks) {
    const x = box.x(value);
    svg.append(draw("line", { x1: x, x2: x, y1: box.top, y2: box.bottom, class: "gridline" }));
    if (x < free) continue;
    free = x + 26;
    svg.append(draw("text", { x, y: box.bottom + 18, "text-anchor": "middle", class: "tick" }, box.across.text(value)));
  }
  const what = { broken: "size of the change, ", anytime: "" }[curves.kind] ?? "epsilon, ";
  svg.append(draw("text", { x: MARGIN.left - 44, y: 12 }, TITLES[curves.kind] || `median size, ${box.along.title}`));
  const middle = (MARGIN.left + box.width - MARGIN.right) / 2;
  svg.append(draw("text", { x: middle, y: box.height - 6, "text-anchor": "middle" }, what + box.across.title));
}

function path({ stairs, ...entry }, box) {
  if (!stairs.length) return "";
  if (isFixed(entry)) return `M${stairs.map(([x, y]) => `${box.x(x).toFixed(1)},${box.y(y).toFixed(1)}`).join("L")}`;
  const steps = stairs.map(([x, y]) => `H${box.x(x).toFixed(1)}V${box.y(y).toFixed(1)}`).join("");
  const end = curves.kind === "anytime" ? "" : `H${box.width - MARGIN.right}`; // an attack ends, a curve of sizes does not
  return `M${box.x(stairs[0][0]).toFixed(1)},${box.y(stairs[0][1]).toFixed(1)}${steps}${end}`;
}

/** Colour and dash of a curve; the pair comes again only after 64 of them. */
function look(index) {
  return { class: `curve s${index % 8}`, "stroke-dasharray": DASHES[(index + Math.floor(index / 8)) % 8] };
}

function sample(index) {
  const svg = draw("svg", { width: 30, height: 10, "aria-hidden": "true" });
  svg.append(draw("line", { x1: 0, x2: 30, y1: 5, y2: 5, ...look(index) }));
  return svg;
}

function drawChart() {
  const group = chosenGroup() || { series: [] };
  const lines = visibleLines();
  const box = frame(lines);
  const svg = draw("svg", {
    viewBox: `0 0 ${box.width} ${box.height}`, height: box.height, tabindex: 0, role: "img",
    "aria-label": `Curves of ${lines.map((line) => line.name).join(", ") || "nothing"}. Arrow keys move the cursor; the numbers are in the table below.`,
  });
  drawAxes(svg, box);
  for (const line of lines) {
    svg.append(draw("path", { d: path(line, box), ...look(line.look) }));
    if (isFixed(line)) svg.append(...line.stairs.map(([x, y]) => draw("circle", { cx: box.x(x), cy: box.y(y), r: 4, class: `dot f${line.look % 8}` })));
  }
  const cursor = draw("line", { y1: box.top, y2: box.bottom, class: "cursor", visibility: "hidden" });
  const tip = make("div", { class: "tip", hidden: "" });
  svg.append(cursor);
  byId("chart").replaceChildren(svg, tip);
  const left = group.series.some((entry) => !fits(entry, curves.kind)) ? " Attacks that stay within an epsilon are under Accuracy and mIoU." : "";
  byId("chart-note").textContent = NOTES[curves.kind] + left;
  const point = (pixel) => showTip({ lines, box, cursor, tip }, pixel);
  svg.addEventListener("pointermove", (event) => point(((event.clientX - svg.getBoundingClientRect().left) * box.width) / svg.clientWidth));
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
    if (!step) return;
    event.preventDefault();
    point((curves.at === null ? MARGIN.left : curves.at) + step);
  });
  drawTable(lines, box);
}

function showTip({ lines, box, cursor, tip }, pixel) {
  curves.at = pixel === null ? null : Math.min(box.width - MARGIN.right, Math.max(MARGIN.left, pixel));
  tip.hidden = pixel === null || !lines.length;
  cursor.setAttribute("visibility", tip.hidden ? "hidden" : "visible");
  if (tip.hidden) return;
  const value = box.back(curves.at);
  cursor.setAttribute("x1", curves.at);
  cursor.setAttribute("x2", curves.at);
  const shown = (y) => (y === null ? "–" : box.along.value(y));
  const rows = lines.map((line) => make("div", {}, sample(line.look), make("span", {}, line.name), make("b", {}, shown(valueAt(line.stairs, value)))));
  tip.replaceChildren(make("div", {}, `at ${box.across.value(value)}`), ...rows);
  // Beside the cursor, where there is more room, and never over the edge of a phone.
  const beside = curves.at > box.width / 2 ? curves.at - tip.offsetWidth - 14 : curves.at + 14;
  tip.style.left = `${Math.max(0, Math.min(beside, box.width - tip.offsetWidth))}px`;
  tip.style.top = `${box.width < 500 ? box.height : MARGIN.top + 8}px`; // below a small chart, of which it would hide half
}

function drawTable(lines, box) {
  const columns = box.across.ticks;
  const head = make("tr", {}, make("th", { scope: "col" }, box.across.title), ...columns.map((x) => make("th", { scope: "col", class: "number" }, box.across.text(x))));
  const cell = (y) => make("td", { class: "number" }, y === null ? "–" : curves.kind === "anytime" ? size(y) : percent(y));
  const rows = lines.map((line) => make("tr", {}, make("th", { scope: "row" }, line.name), ...columns.map((x) => cell(valueAt(line.stairs, x)))));
  byId("chart-table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

function drawLegend() {
  const group = chosenGroup();
  const buttons = (group ? group.series : []).filter((entry) => fits(entry, curves.kind)).map((entry) => {
    const shown = !curves.hidden.has(entry.name);
    const button = make("button", { type: "button", "aria-pressed": String(shown) }, sample(entry.look), entry.name);
    button.addEventListener("click", () => {
      if (!curves.hidden.delete(entry.name)) curves.hidden.add(entry.name);
      button.setAttribute("aria-pressed", String(!curves.hidden.has(entry.name)));
      drawChart();
    });
    return button;
  });
  byId("legend").replaceChildren(...buttons);
}

/** Where every attack stays within an epsilon there is no curve of sizes: accuracy is what there is. */
function chooseKind() {
  const group = chosenGroup();
  if (!group || group.series.some((entry) => fits(entry, curves.kind))) return;
  curves.kind = "accuracy";
  document.querySelector("input[name=kind][value=accuracy]").checked = true;
}

function startCurves() {
  curves.groups = curveGroups();
  byId("curves").hidden = !curves.groups.length;
  if (!RUNS.some((run) => run.curves.anytime)) byId("anytime-choice").remove();
  options(byId("curve-group"), curves.groups.map((group, i) => [i, group.title]));
  byId("curve-group").addEventListener("change", () => {
    curves.hidden.clear();
    chooseKind();
    drawLegend();
    drawChart();
  });
  for (const name of ["kind", "axis"]) {
    byId(`curve-${name}`).addEventListener("change", (event) => {
      curves[name] = event.target.value;
      drawLegend();
      drawChart();
    });
  }
  chooseKind();
  drawLegend();
  let width = 0;
  new ResizeObserver(() => {
    if (byId("chart").clientWidth === width) return; // its height changes with every drawing
    width = byId("chart").clientWidth;
    drawChart();
  }).observe(byId("chart"));
}
