// Data and small helpers. Names are data: they reach the page as text nodes and canvas text only.
const $ = id => document.getElementById(id);
const summary = JSON.parse($("summary").textContent);
const AT_ONCE = 0, AFTER_OP = 1, AFTER_TRANSFER = 2; // and, as in gdp.report.limits, the device or the channel was busy

// `style` is an object: the page's policy forbids the attribute
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  for (const child of children) made.append(child instanceof Node ? child : String(child));
  return made;
}

// headings, ">" in front of which sets a column flush right and "<" lets its names wrap; rows of cells (text or elements)
function table(headings, rows) {
  const kind = heading => ({ ">": { class: "number" }, "<": { class: "name" } }[heading[0]] ?? {});
  const head = element("tr", {}, ...headings.map(heading => element("th", kind(heading), heading.replace(/^[<>]/, ""))));
  const body = rows.map(row => element("tr", row.chosen ? { class: "chosen" } : {},
    ...row.cells.map((cell, index) => element("td", kind(headings[index]), cell))));
  const scroll = element("div", { class: "scroll" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  const holder = element("div", { class: "holder" }, scroll);
  scroll.addEventListener("scroll", () => showCut(holder), { passive: true });
  widths.observe(scroll);
  return holder;
}

// a shadow at each edge behind which a table goes on; one that is cut can be scrolled by keys
function showCut(holder) {
  const scroll = holder.firstChild, hidden = scroll.scrollWidth - scroll.clientWidth;
  holder.classList.toggle("cut-right", hidden - scroll.scrollLeft > 2);
  holder.classList.toggle("cut-left", hidden > 2 && scroll.scrollLeft > 2);
  if (hidden > 2) scroll.setAttribute("tabindex", "0");
  else scroll.removeAttribute("tabindex");
}
const widths = new ResizeObserver(entries => {
  for (const entry of entries) showCut(entry.target.parentElement);
});

// a bar in a cell, `share` of the cell long
function bar(share, colour, mark = null) {
  const width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return element("div", { class: "bar" }, element("i", { style: { width, background: colour } }),
    mark === null ? "" : element("b", { style: { left: `${100 * mark}%` } }));
}

// parts side by side: [{share, colour, title}]
function splitBar(parts, label = "", kind = "") {
  return element("div", { class: `split ${kind}`, ...(label ? { role: "img", "aria-label": label } : {}) },
    ...parts.map(({ share, colour, title }) =>
      element("i", { ...(title ? { title } : {}), style: { background: colour, width: `${100 * share}%` } })));
}

// the colour of a device or a part, in front of its name
const swatch = (colour, kind = "") => element("i", { class: `swatch ${kind}`, style: { background: colour } });

// hides a part of the page that has nothing to show; whether it did
function isAbsent(part, isEmpty) {
  $(part).hidden = isEmpty;
  return isEmpty;
}

// makes `next` the one of a group of elements that the tab key reaches, in place of `before`
function moveFocus(before, next) {
  before.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

const middle = (text, length) =>
  text.length <= length ? text : `${text.slice(0, Math.ceil(length * 0.6))}…${text.slice(-Math.floor(length * 0.4) + 1)}`;

function digits(value, number = 4) {
  if (!Number.isFinite(value) || value === 0) return String(value);
  const decimals = Math.max(number - 1 - Math.floor(Math.log10(Math.abs(value))), 0);
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function time(ns, number = 4) {
  const size = Math.abs(ns);
  if (size === 0) return "0";
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 1e6) return `${digits(ns / 1e3, number)} µs`;
  if (size < 1e10) return `${digits(ns / 1e6, number)} ms`;
  return `${digits(ns / 1e9, number)} s`;
}

// the label of an axis whose ticks are `span` / 5 or so apart
function tick(ns, span) {
  const [unit, name] = span < 5e3 ? [1, "ns"] : span < 5e6 ? [1e3, "µs"] : span < 2e10 ? [1e6, "ms"] : [1e9, "s"];
  const decimals = Math.max(0, Math.min(3, 1 - Math.floor(Math.log10(span / 5 / unit))));
  return `${(ns / unit).toLocaleString("en", { maximumFractionDigits: decimals })} ${name}`;
}

function bytes(size) {
  if (size < 1024) return `${size} B`;
  for (const [unit, name] of [[2 ** 10, "KiB"], [2 ** 20, "MiB"]]) if (size < unit * 1024) return `${digits(size / unit, 3)} ${name}`;
  return `${digits(size / 2 ** 30, 3)} GiB`;
}

const percentAbove = share => `${digits(100 * share, 3)} %`;
const percent = share => `${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)} %`;
const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

// the header and the columns of gdp.report.page_data
async function unpack(text) {
  const letters = atob(text.trim());
  const packed = new Uint8Array(letters.length);
  for (let index = 0; index < letters.length; index++) packed[index] = letters.charCodeAt(index);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const first = Math.ceil((8 + length) / 8) * 8;
  const kinds = { f8: Float64Array, i4: Int32Array, u1: Uint8Array };
  const { columns, ...data } = header;
  for (const [name, [kind, offset, size]] of Object.entries(columns)) {
    data[name] = new kinds[kind](buffer, first + offset, size);
  }
  return data;
}

// the first index in `values` (ascending) that is above `limit`
function above(values, limit, low = 0, high = values.length) {
  while (low < high) {
    const half = (low + high) >>> 1;
    if (values[half] > limit) high = half; else low = half + 1;
  }
  return low;
}

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => css("color-scheme") === "dark";
const isNarrow = width => width < 600;
const leftOf = width => isNarrow(width) ? 100 : 150; // of the charts over the step, so that their times stand one over the other
let isPrinting = false;

// Charts are drawn anew when the theme or the width changes: `draw` gives the option, told the width in pixels.
const charts = [];
function chart(id, height, draw) {
  const place = $(id);
  place.style.height = `${height}px`;
  const made = echarts.init(place, null, { renderer: "canvas" });
  const entry = { chart: made, place, draw: () => made.setOption({ animation: false, ...draw(made.getWidth()) }, true) };
  charts.push(entry);
  entry.draw();
  return made;
}

// one chart anew
const draw = made => charts.find(entry => entry.chart === made).draw();

// one chart anew, as high as its content has become
function resized(made, height) {
  const entry = charts.find(one => one.chart === made);
  entry.place.style.height = `${height}px`;
  entry.draw();
  made.resize(); // draws too, so not before
}

function redraw() {
  for (const entry of charts) {
    entry.chart.resize();
    entry.draw();
  }
}

const axisText = () => ({ color: css("--quiet"), fontSize: 12 });
const axisLook = () => ({
  axisLine: { lineStyle: { color: css("--line") } }, axisTick: { lineStyle: { color: css("--line") } },
  splitLine: { lineStyle: { color: css("--line") } }, axisLabel: axisText(), nameTextStyle: axisText(),
});
// the axis of times of the step, and one with a row for each name
const stepAxis = (width, min, max, label) => ({ type: "value", min, max, splitNumber: isNarrow(width) ? 3 : 6, ...axisLook(),
  axisLabel: { ...axisText(), hideOverlap: true, ...label } });
const rowAxis = (number, label) => ({ type: "category", inverse: true, data: Array.from({ length: number }, (_, row) => String(row)), ...axisLook(),
  axisTick: { show: false }, axisLabel: { ...axisText(), color: css("--text"), interval: 0, ...label } });
const rowNames = width => ({ fontSize: isNarrow(width) ? 11 : 12, length: isNarrow(width) ? 14 : 21 });
const tipLook = () => ({
  renderMode: "richText", confine: true, backgroundColor: css("--raised"), borderColor: css("--line"),
  textStyle: { color: css("--text"), fontSize: 12 },
});
