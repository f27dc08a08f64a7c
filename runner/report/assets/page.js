"use strict";
const by = (id) => document.getElementById(id);

// An element: its attributes, and children that are elements or text, which is never read as HTML.
function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) found.setAttribute(key, value === true ? "" : value);
  }
  found.append(...children.filter((child) => child !== null && child !== undefined));
  return found;
}

// Theme: as the system says, until the button chooses.
const THEMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
try { theme = localStorage.getItem("theme") || "auto"; } catch { /* a page from a file may have no storage */ }
const dark = () => theme === "dark" || (theme === "auto" && system.matches);

function setTheme(name) {
  theme = THEMES.includes(name) ? name : "auto";
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme;
  by("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("theme", theme); } catch { /* not kept */ }
}
setTheme(theme);
by("theme").addEventListener("click", () => { setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3]); redraw(); });
system.addEventListener("change", () => redraw());

// Charts: drawn when they come into view, as wide as their place.
const NARROW = 620;
const specs = JSON.parse(by("specs").textContent);

function config(narrow) {
  const style = getComputedStyle(document.documentElement);
  const [fore, quiet, line] = ["--fore", "--quiet", "--line"].map((name) => style.getPropertyValue(name).trim());
  const colors = dark()
    ? ["#6ea8fe", "#ffa657", "#56d364", "#ff7b72", "#d2a8ff", "#76e3ea", "#f778ba", "#e3b341"]
    : ["#2f6fd0", "#d9730d", "#1a8a4a", "#cf3a3a", "#8250df", "#0f8a93", "#bf3989", "#8a6a00"];
  const words = { labelColor: quiet, titleColor: fore, labelLimit: 0, titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12 };
  return {
    background: "transparent",
    font: "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif",
    axis: { ...words, gridColor: line, domainColor: line, tickColor: line, gridOpacity: 0.5, labelSeparation: 6 },
    legend: { ...words, symbolSize: 120, symbolStrokeWidth: 2, ...(narrow ? { orient: "bottom", columns: 1, direction: "vertical" } : {}) },
    header: { ...words, labelColor: fore, labelFontSize: 13, labelFontWeight: "bold" },
    title: { color: fore }, text: { fill: fore }, view: { stroke: null },
    range: { category: colors },
  };
}

const merged = (under, over) => {
  const found = { ...under };
  for (const [key, value] of Object.entries(over || {})) {
    const both = value && found[key] && typeof value === "object" && typeof found[key] === "object" && !Array.isArray(value);
    found[key] = both ? merged(found[key], value) : value;
  }
  return found;
};

function fitted(spec, width) {
  const narrow = width < NARROW;
  const found = { ...spec, config: merged(config(narrow), spec.config) };
  if (narrow) found.config.legend = { ...found.config.legend, orient: "bottom" };
  const fixed = (one) => typeof one.width === "object" || ["hconcat", "vconcat", "concat"].some((key) => key in one);
  if (spec.spec && spec.facet) {
    const { beside, legend } = { beside: 95, legend: 190, ...spec.usermeta };
    const room = width - (narrow ? 0 : legend);
    const panels = new Set(spec.data.values.map((row) => row[spec.facet.field])).size;
    const most = narrow || "row" in spec.facet ? 1 : Math.min(3, Math.max(1, Math.floor(room / (beside + 235))));
    const columns = Math.ceil(panels / Math.ceil(panels / most)); // rows that are as full as can be
    if (spec.columns || !("row" in spec.facet || "column" in spec.facet)) found.columns = columns;
    if (!fixed(spec.spec) && !("column" in spec.facet)) {
      found.spec = { ...spec.spec, width: Math.max(180, room / columns - beside) };
    }
  } else if (!fixed(spec)) {
    found.width = "container";
    found.autosize = { type: "fit-x", contains: "padding" };
  }
  return found;
}

async function draw(place) {
  const width = place.clientWidth;
  if (!width || typeof vegaEmbed === "undefined") return;
  place.dataset.drawn = `${width < NARROW} ${dark()} ${width}`;
  if (place.view) { place.view.finalize(); place.view = null; }
  try {
    place.view = await vegaEmbed(place, fitted(specs[place.dataset.spec], width), { actions: false, renderer: "svg" });
  } catch (error) {
    place.textContent = `This chart cannot be drawn: ${error.message}`;
    place.classList.add("failed");
  }
}

const charts = [...document.querySelectorAll(".chart[data-spec]")];
for (const place of charts) {
  const spec = specs[place.dataset.spec];
  if (spec.facet || spec.hconcat || spec.concat || spec.usermeta?.broad) place.closest("figure").classList.add("broad");
}
// The grid has two columns: the last of an odd number of narrow charts has a row for itself.
for (const panels of document.querySelectorAll(".panels")) {
  const narrow = [...panels.querySelectorAll("figure:not(.broad)")];
  if (narrow.length % 2) narrow.at(-1).classList.add("broad");
}
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
}, { rootMargin: "600px" });
charts.forEach((place) => seen.observe(place));
const redraw = () => charts.filter((place) => place.dataset.drawn).forEach(draw);
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => charts.filter((p) => p.dataset.drawn && !p.dataset.drawn.endsWith(` ${p.clientWidth}`)).forEach(draw), 150);
});
addEventListener("beforeprint", () => charts.filter((place) => !place.dataset.drawn).forEach(draw));
