const DASHES = ["", "9 4", "2 4", "12 4 2 4", "5 3", "14 6", "2 2", "9 3 2 3 2 3"];
const TICKS = [0.01, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 255];
const MARGIN = { top: 30, right: 18, bottom: 44, left: 50 };
const LINEAR_TO = 2; // 255ths: below, the mixed axis is linear, and above, logarithmic
const NOTES = {
  broken: "Share of images that no change up to this size was found for. The lower a curve, the stronger the attack; the higher, the more robust the model.",
  accuracy: "Pixel accuracy when every image whose perturbation fits into epsilon is replaced by its perturbed version.",
  miou: "Mean IoU, pooled over images, when every image whose perturbation fits into epsilon is replaced by its perturbed version.",
};
const TITLES = { broken: "images not broken", accuracy: "pixel accuracy", miou: "mean IoU" };
const curves = { groups: [], hidden: new Set(), kind: "broken", axis: "mixed", at: null };

/** Everything worth comparing: attacks on one model, models under one attack. */
function curveGroups() {
  const drawn = RUNS.filter((run) => run.records.length);
  const collect = (title, key, name, kind) =>
    unique(drawn.map(key)).map((value) => {
      const runs = drawn.filter((run) => key(run) === value);
      return { title: `${title}: ${value}`, series: runs.map((run) => ({ run, name: run[name], look: run.colours[kind] })) };
    });
  const attacks = collect("Attacks", setting, "attack", "attack");
  const underOne = (run) => [run.attack, run.dataset, run.goal].join(" · ");
  const models = collect("Models", underOne, "model", "model").filter((group) => group.series.length > 1);
  return [...attacks, ...models];
}

/** Points [x, y] of a falling staircase. */
function points(run, kind) {
  if (kind !== "broken") return run.damage.epsilon.map((x, i) => [x, run.damage[kind][i]]).filter(([, y]) => y !== null);
  const sizes = run.records.filter((r) => r.success && r.size !== null).map((r) => r.size).sort((a, b) => a - b);
  const total = run.records.length;
  return [[0, 1], ...sizes.map((x, i) => [x, 1 - (i + 1) / total])];
}

function valueAt(stairs, x) {
  let value = stairs.length ? stairs[0][1] : null;
  for (const [at, y] of stairs) {
    if (at > x) break;
    value = y;
  }
  return value;
}

/** From sizes to [0, 1] and back. */
function scale(kind, most, least) {
  const log = (low) => ({ to: (x) => Math.log(Math.max(x, low) / low), from: (t) => low * Math.exp(t) });
  const mixed = {
    to: (x) => (x <= LINEAR_TO ? x / LINEAR_TO : 1 + Math.log(x / LINEAR_TO)),
    from: (t) => (t <= 1 ? t * LINEAR_TO : LINEAR_TO * Math.exp(t - 1)),
  };
  const shape = { mixed, linear: { to: (x) => x, from: (t) => t }, log: log(least) }[kind];
  const end = shape.to(most);
  return { to: (x) => Math.min(1, shape.to(x) / end), from: (t) => shape.from(t * end) };
}

function ticks(kind, most, least) {
  if (kind === "log") return TICKS.filter((x) => x >= least && x <= most);
  if (kind === "mixed") return [0, ...TICKS.filter((x) => x >= 0.5 && x <= most)];
  const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50].find((s) => most / s <= 8) || 50;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => Number((i * step).toFixed(2)));
}

/** The range of sizes of a group: up to the next round number, so that curves end inside. */
function domain(lines, kind) {
  const sizes = lines.flatMap((line) => line.stairs.map(([x]) => x)).filter((x) => x > 0);
  const largest = Math.max(...sizes, 0.5);
  const most = kind === "linear" ? Math.min(255, largest * 1.08) : TICKS.find((x) => x >= largest * 1.02) || 255;
  const smallest = Math.min(...sizes, most / 4);
  return { most: Math.max(most, kind === "mixed" ? 4 : 0), least: [...TICKS].reverse().find((x) => x <= smallest) || 0.01 };
}

function visibleLines() {
  const group = curves.groups[Number(byId("curve-group").value)];
  const shown = group ? group.series.filter((entry) => !curves.hidden.has(entry.name)) : [];
  return shown.map((entry) => ({ ...entry, stairs: points(entry.run, curves.kind) }));
}

/** Geometry of the chart at its present width. */
function frame(lines) {
  const width = Math.max(280, byId("chart").clientWidth);
  const height = Math.max(240, Math.min(440, width * 0.5));
  const { most, least } = domain(lines, curves.axis);
  const across = scale(curves.axis, most, least);
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  return {
    width, height, most, least,
    x: (value) => MARGIN.left + across.to(value) * inner.width,
    y: (value) => MARGIN.top + (1 - value) * inner.height,
    back: (pixel) => across.from(Math.min(1, Math.max(0, (pixel - MARGIN.left) / inner.width))),
  };
}

function drawAxes(svg, box) {
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const y = box.y(share);
    svg.append(draw("line", { x1: MARGIN.left, x2: box.width - MARGIN.right, y1: y, y2: y, class: share ? "gridline" : "axis" }));
    svg.append(draw("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, `${share * 100}%`));
  }
  let free = -Infinity; // labels must not run into each other on a phone
  for (const value of ticks(curves.axis, box.most, box.least)) {
    const x = box.x(value);
    svg.append(draw("line", { x1: x, x2: x, y1: box.y(1), y2: box.y(0), class: "gridline" }));
    if (x < free) continue;
    free = x + 26;
    svg.append(draw("text", { x, y: box.y(0) + 18, "text-anchor": "middle", class: "tick" }, String(value)));
  }
  svg.append(draw("text", { x: MARGIN.left - 44, y: 12 }, TITLES[curves.kind]));
  const title = curves.kind === "broken" ? "size of the change, linf × 255" : "epsilon, linf × 255";
  const middle = (MARGIN.left + box.width - MARGIN.right) / 2;
  svg.append(draw("text", { x: middle, y: box.height - 6, "text-anchor": "middle" }, title));
}

function path(stairs, box) {
  if (!stairs.length) return "";
  const steps = stairs.map(([x, y]) => `H${box.x(x).toFixed(1)}V${box.y(y).toFixed(1)}`).join("");
  return `M${box.x(stairs[0][0]).toFixed(1)},${box.y(stairs[0][1]).toFixed(1)}${steps}H${box.width - MARGIN.right}`;
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
  const lines = visibleLines();
  const box = frame(lines);
  const svg = draw("svg", {
    viewBox: `0 0 ${box.width} ${box.height}`, height: box.height, tabindex: 0, role: "img",
    "aria-label": `Curves of ${lines.map((line) => line.name).join(", ") || "nothing"}. Arrow keys move the cursor; the numbers are in the table below.`,
  });
  drawAxes(svg, box);
  for (const line of lines) svg.append(draw("path", { d: path(line.stairs, box), ...look(line.look) }));
  const cursor = draw("line", { y1: box.y(1), y2: box.y(0), class: "cursor", visibility: "hidden" });
  const tip = make("div", { class: "tip", hidden: "" });
  svg.append(cursor);
  byId("chart").replaceChildren(svg, tip);
  byId("chart-note").textContent = NOTES[curves.kind];
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
  const rows = lines.map((line) => make("div", {}, sample(line.look), make("span", {}, line.name), make("b", {}, percent(valueAt(line.stairs, value)))));
  tip.replaceChildren(make("div", {}, `at ${size(value)}/255`), ...rows);
  // Beside the cursor, where there is more room, and never over the edge of a phone.
  const beside = curves.at > box.width / 2 ? curves.at - tip.offsetWidth - 14 : curves.at + 14;
  tip.style.left = `${Math.max(0, Math.min(beside, box.width - tip.offsetWidth))}px`;
  tip.style.top = `${box.width < 500 ? box.height : MARGIN.top + 8}px`; // below a small chart, of which it would hide half
}

function drawTable(lines, box) {
  const sizes = TICKS.filter((x) => x >= 0.25 && x <= box.most);
  const head = make("tr", {}, make("th", { scope: "col" }, "linf × 255"), ...sizes.map((x) => make("th", { scope: "col", class: "number" }, String(x))));
  const rows = lines.map((line) => {
    const cells = sizes.map((x) => make("td", { class: "number" }, percent(valueAt(line.stairs, x))));
    return make("tr", {}, make("th", { scope: "row" }, line.name), ...cells);
  });
  byId("chart-table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

function drawLegend() {
  const group = curves.groups[Number(byId("curve-group").value)];
  const buttons = (group ? group.series : []).map((entry) => {
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

function startCurves() {
  curves.groups = curveGroups();
  byId("curves").hidden = !curves.groups.length;
  options(byId("curve-group"), curves.groups.map((group, i) => [i, group.title]));
  byId("curve-group").addEventListener("change", () => {
    curves.hidden.clear();
    drawLegend();
    drawChart();
  });
  for (const name of ["kind", "axis"]) {
    byId(`curve-${name}`).addEventListener("change", (event) => {
      curves[name] = event.target.value;
      drawChart();
    });
  }
  drawLegend();
  let width = 0;
  new ResizeObserver(() => {
    if (byId("chart").clientWidth === width) return; // its height changes with every drawing
    width = byId("chart").clientWidth;
    drawChart();
  }).observe(byId("chart"));
}
