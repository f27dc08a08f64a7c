// Runs: columns as {all}, {each} or {of, at}; see runner/report/entries.py.
const { columns, count, workload } = JSON.parse(by("data").textContent);
const column = Object.fromEntries(columns.map((one) => [one.key, one]));
const value = (one, run) => {
  const data = one && one.data;
  if (!data) return null;
  return "all" in data ? data.all : "of" in data ? data.of[data.at[run]] : data.each[run];
};
const at = (key, run) => value(column[key], run);
const facts = columns.filter((one) => one.group === "fact");
for (const one of facts) one.shown = !["label", "attention", "options", "limited by"].includes(one.key); // the label has the second and third
// A time has its interquartile range over its median, and the ends of its interval, in other columns.
for (const one of columns.filter((one) => one.group === "metric" && one.key.endsWith("_ms"))) {
  const [iqr, low, high] = ["iqr", "low", "high"].map((end) => column[one.key.replace(/ms$/, end)]);
  if (low) one.also = { iqr, low, high };
}
const times = columns.filter((one) => one.also).sort((a, b) => (b.key === "total_ms") - (a.key === "total_ms"));

const digits = (x) => (x >= 99.995 ? x.toFixed(1) : x >= 9.9995 ? x.toFixed(2) : x >= 0.001 || x === 0 ? x.toFixed(3) : x.toPrecision(3));
const FORMATS = {
  ms: digits, number: (x) => (Math.abs(x) < 0.1 ? x.toPrecision(3) : digits(x)), percent: (x) => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`,
  count: (x) => Math.round(x).toLocaleString("en"), power: (x) => x.toExponential(2),
  bytes: (x) => (x >= 2 ** 30 ? `${(x / 2 ** 30).toFixed(2)} GiB` : x >= 2 ** 20 ? `${(x / 2 ** 20).toFixed(1)} MiB` : `${(x / 2 ** 10).toFixed(0)} KiB`),
};
function text(one, x) {
  if (x === null || x === undefined) return "";
  if (FORMATS[one.format] && typeof x === "number") return FORMATS[one.format](x);
  return typeof x === "number" && x >= 1000 ? x.toLocaleString("en") : String(x);
}
const collator = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b)));

const STEP = 100, MOST_CHOICES = 40, FILTERS = 5, NOISY = 0.05;
let order = [...Array(count).keys()], limit = STEP, sorted = null, pins = [];
const open = new Set();
// Found as it is recorded, 2048, and as it is shown, 2,048.
const searched = columns.filter((one) => ["fact", "metric"].includes(one.group) || ["name", "reason"].includes(one.key));
const words = order.map((run) => searched.flatMap((one) => [text(one, value(one, run)), value(one, run) ?? ""]).join(" ").toLowerCase());

const chosen = {};
for (const one of [column.status, ...facts.filter((one) => one.key !== "status")]) {
  const choices = [...new Set(order.map((run) => value(one, run)))];
  if (choices.length < 2 || choices.length > MOST_CHOICES || one.key === "label") continue;
  const options = choices.map((x) => (x === null ? "" : x)).sort(compare).map((x) => make("option", { value: JSON.stringify(x) }, x === "" ? "none" : text(one, x)));
  const select = make("select", { "data-key": one.key, onchange: () => { chosen[one.key] = select.value; limit = STEP; show(); } }, make("option", { value: "" }, "all"), ...options);
  const label = make("label", {}, `${one.title} `, select);
  if (by("filters").querySelectorAll("select").length < FILTERS) by("others").before(label);
  else by("others").append(label, " ");
}
by("others").hidden = !by("others").querySelector("select");
by("others").before(make("button", { type: "button", id: "clear", onclick: () => { by("filters").reset(); for (const key in chosen) chosen[key] = ""; limit = STEP; show(); } }, "Clear"));
by("filters").addEventListener("submit", (event) => event.preventDefault());
by("search").addEventListener("input", () => { limit = STEP; show(); });

function kept() {
  const wanted = by("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const picked = Object.entries(chosen).filter(([, x]) => x).map(([key, x]) => [column[key], JSON.parse(x)]);
  return order.filter((run) => wanted.every((word) => words[run].includes(word)) && picked.every(([one, x]) => (value(one, run) ?? "") === x));
}

function sortBy(one) {
  const down = sorted && sorted.key === one.key ? !sorted.down : one.better === "higher";
  sorted = { key: one.key, down };
  order.sort((a, b) => {
    const [x, y] = [value(one, a), value(one, b)];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return (down ? -1 : 1) * compare(x, y) || a - b;
  });
  show();
  [...document.querySelectorAll("#table th button")].find((button) => button.dataset.key === one.key)?.focus();
}

// The columns of these runs: the label and the times first; no column that is empty or, of several runs, the same in all.
function shownOf(runs) {
  const differs = (one) => new Set(runs.map((run) => value(one, run))).size > 1;
  const some = (one) => runs.some((run) => value(one, run) !== null);
  return [
    column.label, ...times.filter(some),
    ...columns.filter((one) => one.shown && one.key !== "label" && !times.includes(one) && (runs.length > 1 ? differs(one) : some(one))),
  ];
}
const kindOf = (one) => (one.group === "fact" ? "words" : one.also ? "time" : "");

// A long title in two lines.
function halved(title) {
  const places = [...title].map((letter, i) => (letter === " " ? i : -1)).filter((i) => i > 0);
  const place = places.sort((a, b) => Math.abs(a - title.length / 2) - Math.abs(b - title.length / 2))[0];
  return title.length > 13 && place ? `${title.slice(0, place)}\n${title.slice(place + 1)}` : title;
}

function head(shown) {
  const cells = shown.map((one, i) => make("th", {
    scope: "col", class: i ? kindOf(one) || null : "acts words", "aria-sort": sorted?.key === one.key ? (sorted.down ? "descending" : "ascending") : null,
  }, make("button", { type: "button", "data-key": one.key, onclick: () => sortBy(one) }, halved(one.title))));
  return make("tr", {}, ...cells);
}

function cell(one, run) {
  const x = value(one, run);
  const share = one.also && x !== null ? value(one.also.iqr, run) : null;
  const kind = `${kindOf(one)} ${one.key === "status" && x !== "ok" ? "failed" : ""}`.trim();
  return make("td", { class: kind || null, title: share === null ? null : `interquartile range ${percent(share)} of the median` }, text(one, x));
}

// One badge a run: the largest interquartile range over the median of its times.
const percent = (share) => FORMATS.percent(share);
function noise(run) {
  const worst = Math.max(0, ...times.map((one) => value(one.also.iqr, run) ?? 0));
  return worst <= NOISY ? null : make("span", { class: "noisy", title: "the largest interquartile range over the median of its times" }, ` IQR ${percent(worst)}`);
}

function row(run, shown) {
  const expanded = open.has(run), name = at("name", run);
  const details = make("button", { type: "button", class: "open", "aria-expanded": String(expanded), "aria-label": `details of ${name}`, onclick: () => { open.has(run) ? open.delete(run) : open.add(run); again(`tr[data-run="${run}"] .open`); } }, expanded ? "−" : "+");
  const pin = make("button", { type: "button", class: "pin", "aria-pressed": String(pins.includes(run)), "aria-label": `pin ${name}`, title: "pin two runs to compare them", onclick: () => { pinned(run); again(`tr[data-run="${run}"] .pin`); if (pins.length === 2) by("pinned").scrollIntoView(); } }, "pin");
  const first = make("td", { class: "acts words" }, details, pin, make("span", { class: "label", title: name }, text(column.label, at("label", run))), noise(run));
  const rows = [make("tr", { "data-run": run, class: pins.includes(run) ? "pinned" : null }, first, ...shown.slice(1).map((one) => cell(one, run)))];
  if (expanded) rows.push(make("tr", { class: "details" }, make("td", { colspan: shown.length }, inside(run))));
  return rows;
}

const listed = (pairs) => make("dl", {}, ...pairs.flatMap(([key, x]) => [make("dt", {}, key), make("dd", {}, x)]));
function block(title, content, across) { return make("div", { class: across ? "across" : null }, make("h4", {}, title), content); }

function inside(run) {
  const of = (group) => columns.filter((one) => one.group === group && value(one, run) !== null).map((one) => [one.title, text(one, value(one, run))]);
  const details = make("div", { class: "inside" });
  if (at("reason", run)) details.append(block(at("status", run) === "ok" ? "Note" : `Why it is ${at("status", run)}`, make("p", {}, at("reason", run)), true));
  if (at("log", run)) details.append(block("End of its log", make("pre", {}, at("log", run)), true));
  if (at("command", run)) details.append(block("Repeat", make("pre", {}, at("command", run)), true));
  if (at("files", run)) {
    const links = Object.entries(at("files", run)).flatMap(([name, path]) => [make("a", { href: path }, name.startsWith("trace") ? `${name} (open it in Perfetto)` : name), " "]);
    details.append(block("Files", make("p", {}, ...links), true));
  }
  const measured = [...of("fact"), ...of("metric"), ...times.map((one) => [`${one.title} IQR`, text({ format: "percent" }, value(one.also.iqr, run))]).filter(([, x]) => x)];
  details.append(block("This run", listed([["name", at("name", run)], ...measured])), block("Environment", listed(of("environment"))), block("Configuration", configuration(run)));
  return details;
}

// What differs from the defaults of the chosen groups; the rest behind a click.
function configuration(run) {
  const changed = new Set(at("changed", run)), pairs = columns.filter((one) => one.group === "config" && value(one, run) !== null);
  const some = (is) => listed(pairs.filter((one) => changed.has(one.title) === is).map((one) => [one.title, value(one, run)]));
  return make("div", {}, some(true), make("details", {}, make("summary", {}, "as by default"), some(false)));
}

function pinned(run) {
  pins = pins.includes(run) ? pins.filter((one) => one !== run) : [...pins, run].slice(-2);
  by("pinned").hidden = !pins.length;
  by("pinned").replaceChildren(...(pins.length ? comparison() : []));
}

// A metric of B over A. Times whose intervals overlap are even, and so are the rates that follow from them. Nothing is called better
// without intervals, but for memory, and of runs that did not do the same work.
const OF_TIMES = ["tokens_per_s", "tflops_per_device", "sol", "mfu", "speedup", "efficiency"];
function ratio(one, a, b, alike) {
  const [x, y] = [value(one, a), value(one, b)];
  if (x === null || y === null || !x) return make("td", {}, "");
  const timed = [column.total_ms, column.forward_ms].find((c) => c && value(c, a) !== null && value(c, b) !== null);
  const also = one.also || (OF_TIMES.includes(one.key) ? timed?.also : null);
  const ends = also ? [value(also.low, a), value(also.high, a), value(also.low, b), value(also.high, b)] : [];
  const unknown = ends.some((end) => end === null);
  const even = also && !unknown && ends[0] <= ends[3] && ends[2] <= ends[1];
  const better = one.better === "lower" ? y < x : y > x;
  const judged = alike && one.better && x !== y && !even && !unknown && (also || one.format === "bytes");
  return make("td", { class: judged ? (better ? "better" : "worse") : null }, `${(y / x).toFixed(3)}${even ? " (even: the spreads overlap)" : unknown ? " (spread unknown)" : ""}`);
}

function comparison() {
  const [a, b] = pins;
  const heading = make("h3", {}, b === undefined ? "A is pinned: pin a second run to compare" : "A and B side by side");
  if (b === undefined) return [heading, make("p", {}, at("name", a))];
  const twice = (one) => one.group === "config" && facts.includes(column[one.title.replace(/\.(name|method)$/, "")]);
  const differ = columns.filter((one) => ["fact", "config", "environment"].includes(one.group) && !["environment.started", "label"].includes(one.key) && !twice(one) && value(one, a) !== value(one, b));
  const apart = differ.filter((one) => workload.includes(one.key));
  const warning = apart.length ? make("p", { class: "failed" }, `Not the same work: ${apart.map((one) => `${one.title} ${text(one, value(one, a)) || "none"} and ${text(one, value(one, b)) || "none"}`).join(", ")}.`) : null;
  const metrics = columns.filter((one) => one.group === "metric" && (value(one, a) !== null || value(one, b) !== null));
  const rows = [
    make("tr", {}, make("td", { class: "words" }, "run"), make("td", { class: "words" }, at("name", a)), make("td", { class: "words" }, at("name", b)), make("td", {}, "")),
    ...differ.map((one) => make("tr", {}, ...[one.title, text(one, value(one, a)), text(one, value(one, b)), ""].map((x) => make("td", { class: "words" }, x)))),
    ...metrics.map((one) => make("tr", {}, make("td", { class: "words" }, one.title), cell(one, a), cell(one, b), ratio(one, a, b, !apart.length))),
  ];
  const titles = make("tr", {}, ...["", "A", "B", "B / A"].map((title, i) => make("th", { scope: "col", class: i === 0 ? "words" : null }, title)));
  const clear = make("button", { type: "button", id: "unpin", onclick: () => { pins = []; by("pinned").hidden = true; show(); } }, "Unpin both");
  return [heading, ...(warning ? [warning] : []), make("div", { class: "wide", tabindex: 0 }, make("table", {}, make("thead", {}, titles), make("tbody", {}, ...rows))), clear];
}

function again(focus) { show(); document.querySelector(focus)?.focus(); }

function show() {
  const runs = kept();
  by("count").textContent = `${runs.length.toLocaleString("en")} of ${count.toLocaleString("en")} runs${runs.length > limit ? `, the first ${limit} shown` : ""}. Click a title to sort; pin two runs to compare them.`;
  const shown = shownOf(runs), table = by("table");
  table.tHead.replaceChildren(head(shown));
  table.tBodies[0].replaceChildren(...runs.slice(0, limit).flatMap((run) => row(run, shown)));
  table.style.setProperty("--label", `${table.querySelector("th").offsetWidth}px`);
  by("more").hidden = runs.length <= limit;
}
by("next").addEventListener("click", () => { limit += STEP; show(); });
by("all").addEventListener("click", () => { limit = count; show(); });
show();
