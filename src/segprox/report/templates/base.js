"use strict";
// Names come from data and may hold anything: they reach the page as text only, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const byId = (id) => document.getElementById(id);

/** A new element: attributes, then children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The same for pictures made of lines. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => make("option", { value }, text)));
}

const unique = (values) => [...new Set(values)];
const setting = (run) => [run.model, run.dataset, run.goal, ...(run.norm === "linf" ? [] : [run.norm])].join(" · ");
const percent = (share, digits = 1) => (share === null ? "–" : (100 * share).toFixed(digits) + "%");
const colour = (values) => `rgb(${values.join(" ")})`;

/** A size in its unit, with as many digits as make sense. */
function size(value, unit) {
  if (value === null) return "–";
  return value.toFixed(value >= 100 ? 0 : value >= 1 ? 1 : unit === "share" && value < 0.1 ? 3 : 2);
}

// linf is in 255ths, or where images are not of 8 bits in percent of their range ("share"); other norms are as they are.
const withUnit = (value, unit) => size(value, unit) + ({ linf: "/255", share: "% of the range" }[unit] || ` in ${unit}`);
const unitName = (unit) => ({ linf: "linf × 255", share: "linf, % of the range" })[unit] || unit;
const WHOLE = { linf: 255, share: 100 }; // the whole range: what an image that was not broken counts as
const linfUnit = (run) => (run.rounded === "8 bits" ? "linf" : "share");

/** Storage may be refused to files on a disk. */
function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // The choice then lasts as long as the page.
  }
}

function recall(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

function startTheme() {
  const root = document.documentElement;
  const chosen = recall("segprox-theme");
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  byId("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    remember("segprox-theme", root.dataset.theme);
  });
}
