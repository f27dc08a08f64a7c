"use strict";
const by = (id) => document.getElementById(id);

// An element: its attributes, and children that are elements or text, which is never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
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

// Charts: drawn when they come into view, as wide as their place. THEME is that of pictures; colours are the page's.
const NARROW = 620, LEAST = 235, MOST_COLUMNS = 3, LONG = 30;
const specs = JSON.parse(by("specs").textContent);

const merged = (under, over) => {
  const result = { ...under };
  for (const [key, value] of Object.entries(over || {})) {
    const both = value && result[key] && typeof value === "object" && typeof result[key] === "object" && !Array.isArray(value);
    result[key] = both ? merged(result[key], value) : value;
  }
  return result;
};

function config(narrow) {
  const style = getComputedStyle(document.documentElement);
  const [fore, quiet, line] = ["--fore", "--quiet", "--line"].map((name) => style.getPropertyValue(name).trim());
  const words = { labelColor: quiet, titleColor: fore };
  return merged(THEME, {
    background: "transparent",
    font: "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif",
    axis: { ...words, gridColor: line, domainColor: line, tickColor: line },
    legend: { ...words, ...(narrow ? { orient: "bottom", columns: 1, direction: "vertical" } : {}) },
    header: { labelColor: fore }, title: { color: fore }, text: { fill: fore },
    ...(dark() ? { range: { category: ["#6ea8fe", "#ffa657", "#56d364", "#ff7b72", "#d2a8ff", "#76e3ea", "#f778ba", "#e3b341"] } } : {}),
  });
}

async function embedded(place, change) {
  if (place.view) place.view.finalize();
  const spec = { ...specs[place.dataset.spec], config: config(place.clientWidth < NARROW), ...change };
  place.view = await vegaEmbed(place, spec, { actions: false, renderer: "svg" });
}

// Facets share the width that their labels and the legend leave, as many beside each other as are wide enough.
async function faceted(place, spec) {
  const panels = new Set(spec.data.values.map((row) => row[spec.facet.field])).size;
  for (let most = spec.columns === 1 || place.clientWidth < NARROW ? 1 : MOST_COLUMNS; ; most--) {
    const columns = Math.ceil(panels / Math.ceil(panels / most)); // rows that are as full as can be
    const sized = (width) => ({ columns, spec: { ...spec.spec, width } });
    let width = LEAST, left = 0;
    for (let turn = 0; turn < 4; turn++) { // what stands beside facets changes a little with their width
      await embedded(place, sized(width));
      left = (place.clientWidth - place.querySelector("svg").width.baseVal.value) / columns;
      if (Math.abs(left) < 2 && left >= 0) return;
      width = Math.max(width + left - 1, 120);
      if (width < LEAST && most > 1) break;
    }
    if (width >= LEAST || most === 1) return;
  }
}

async function draw(place) {
  const width = place.clientWidth, spec = specs[place.dataset.spec];
  if (!width || typeof vegaEmbed === "undefined") return;
  place.dataset.drawn = `${width < NARROW} ${dark()} ${width}`;
  try {
    await (spec.spec ? faceted(place, spec) : embedded(place, { width: "container", autosize: { type: "fit-x", contains: "padding" } }));
  } catch (error) {
    place.textContent = `This chart cannot be drawn: ${error.message}`;
    place.classList.add("failed");
  }
}

const charts = [...document.querySelectorAll(".chart[data-spec]")];
for (const place of charts) {
  const spec = specs[place.dataset.spec];
  const long = spec.data.values.some((row) => [row.label, row.shape].some((text) => text?.length > LONG));
  if (spec.facet || long) place.closest("figure").classList.add("broad");
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
