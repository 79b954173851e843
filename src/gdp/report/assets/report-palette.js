// Colours that colour-blind people tell apart: Okabe and Ito (2008), their black left to text; grey is all else.
const OKABE_ITO = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const OTHER = "#8d95a3";
const HATCHED = "repeating-linear-gradient(45deg, #8d95a3 0 3px, transparent 3px 6px)"; // of waits and transfers: no device's colour
const SCALE = ["#0072b2", "#56b4e9", "#009e73", "#e6c229", "#d55e00", "#cc79a7"]; // of layers, from the first to the last
const PHASES = { forward: 0, backward: 1, recomputed: 2, update: 3, exchange: 4 };
const MOST_LISTED = 12; // layers that a legend names one by one

// more than eight devices: the same hues, darker
const deviceColour = device => device < 7 ? OKABE_ITO[device] : device === 7 ? OTHER : darker(OKABE_ITO[device % 7], 0.75 ** Math.min(Math.floor(device / 7), 4));

// the colour of a line, which is thin: yellow is too light for white ground
const lineColour = device => deviceColour(device) === "#f0e442" && !isDark() ? "#a89b00" : deviceColour(device);

const rgb = colour => [16, 8, 0].map(shift => (parseInt(colour.slice(1), 16) >> shift) & 255);
const hex = parts => `#${parts.map(part => Math.round(part).toString(16).padStart(2, "0")).join("")}`;
const darker = (colour, share) => hex(rgb(colour).map(part => part * share));

// black or white, whichever stands out (the brightness of W3C's AERT, 2000)
function inkOn(colour) {
  const [red, green, blue] = rgb(colour);
  return (299 * red + 587 * green + 114 * blue) / 1000 > 125 ? "#000000" : "#ffffff";
}

// the colour at `share` of the way through SCALE
function onScale(share) {
  const at = Math.min(Math.max(share, 0), 1) * (SCALE.length - 1), low = Math.min(Math.floor(at), SCALE.length - 2);
  const from = rgb(SCALE[low]), to = rgb(SCALE[low + 1]);
  return hex(from.map((part, index) => part + (to[index] - part) * (at - low)));
}

// the first `depth` parts of a module's path
function prefix(module, depth) {
  let end = -1;
  for (let part = 0; part < depth; part++) {
    end = module.indexOf(".", end + 1);
    if (end < 0) return module;
  }
  return module.slice(0, end);
}

// The deepest level of modules with at most 7 names, so that each has a colour; level 1 if even that has more.
function moduleLevel(modules) {
  let best = 1;
  for (let depth = 1; depth <= 6; depth++) {
    const names = new Set(modules.map(module => prefix(module, depth)));
    names.delete("");
    if (names.size > 7) break;
    best = depth;
  }
  return best;
}

// What ops can be coloured by, the best first: a pipeline by its micro-batches, a stack of layers by layer.
function colourings(data) {
  return [...(data.microbatch.length ? ["micro-batch"] : []), ...(data.layerLists.some(Boolean) ? ["layer"] : []), "module", "phase", "kind"];
}

// {colours: [C < DIM], of: Uint8Array [N] the colour of each op, names: [{name, colour}] for the legend,
//  label: null or op => text}: what is written on blocks, "" for nothing
function colouring(data, by) {
  return by === "layer" ? byLayer(data) : by === "micro-batch" ? byMicrobatch(data) : byName(data, by);
}

const layerLabel = (data, layer) => data.layerLists[layer] ? data.layers[layer].slice(data.layers[layer].lastIndexOf(".") + 1) : middle(data.layers[layer], 24);

function byLayer(data) {
  const size = data.layers.length, shown = Math.min(size, DIM - 1); // many layers: neighbours share a colour
  const colours = Array.from({ length: shown }, (_, at) => size <= 7 ? OKABE_ITO[at] : onScale(at / (shown - 1)));
  const colourOf = Int32Array.from(data.layers, (_, layer) => Math.floor(layer * shown / size));
  const ofModule = data.layerOf.map(layer => layer < 0 ? shown : colourOf[layer]);
  const colour = layer => colours[colourOf[layer]], names = [];
  for (let layer = 0; layer < size;) {
    let end = layer + 1;
    while (end < size && data.layerLists[end] && data.layerLists[end] === data.layerLists[layer]) end++;
    if (size <= MOST_LISTED || end === layer + 1) {
      for (; layer < end; layer++) names.push({ name: data.layers[layer], colour: colour(layer) });
    } else {
      const stops = Array.from({ length: 6 }, (_, at) => colour(layer + Math.round(at / 5 * (end - 1 - layer))));
      names.push({ name: `${data.layers[layer]} to ${layerLabel(data, end - 1)}`, colour: `linear-gradient(90deg, ${stops.join(", ")})`, isWide: true });
      layer = end;
    }
  }
  if (data.layerOf.includes(-1)) names.push({ name: "outside any layer", colour: OTHER });
  const labels = data.layers.map((_, layer) => layerLabel(data, layer));
  return { colours: [...colours, OTHER], names: names.length > 4 * MOST_LISTED ? [...names.slice(0, 4 * MOST_LISTED), { name: "…", colour: OTHER }] : names,
    of: Uint8Array.from(data.module, module => ofModule[module]), label: op => labels[data.layerOf[data.module[op]]] ?? "" };
}

function byMicrobatch(data) {
  const number = data.microbatch.reduce((most, value) => Math.max(most, value), 0) + 1, hues = Math.min(number, 7);
  const isLate = data.phases.map(phase => ["backward", "recomputed", "update"].includes(phase));
  const colours = OKABE_ITO.slice(0, hues).flatMap(colour => [colour, darker(colour, 0.62)]);
  const names = OKABE_ITO.slice(0, hues).map((colour, hue) => ({
    name: `micro-batch ${hue}${number > hue + 7 ? `, ${hue + 7}${number > hue + 14 ? ", …" : ""}` : ""}`,
    colour: `linear-gradient(90deg, ${colour} 50%, ${darker(colour, 0.62)} 50%)` }));
  return { colours: [...colours, OTHER], names: [...names, { name: `shared by all${isLate.includes(true) ? "; dark: backward" : ""}`, colour: OTHER }],
    of: Uint8Array.from(data.microbatch, (value, op) => value < 0 ? colours.length : 2 * (value % 7) + Number(isLate[data.phase[op]])),
    label: op => data.microbatch[op] < 0 ? "" : String(data.microbatch[op]) };
}

function byName(data, by) {
  const level = by === "module" ? moduleLevel(data.modules) : 0;
  const numbers = { module: data.module, phase: data.phase, kind: data.kind }[by];
  const labels = by === "module" ? data.modules.map(module => prefix(module, level)) : { phase: data.phases, kind: data.kinds }[by];
  const totals = new Map();
  for (let op = 0; op < numbers.length; op++) {
    const label = labels[numbers[op]];
    totals.set(label, (totals.get(label) || 0) + data.finish[op] - data.start[op]);
  }
  const ranked = [...totals.keys()].filter(label => label !== "").sort((a, b) => totals.get(b) - totals.get(a));
  let named = ranked.slice(0, 7);
  if (by === "phase") named = ranked.sort((a, b) => (PHASES[a] ?? 9) - (PHASES[b] ?? 9));
  else if (by === "module") named.sort((a, b) => data.modules.findIndex(m => m.startsWith(a)) - data.modules.findIndex(m => m.startsWith(b)));
  const others = totals.size > named.length;
  const colourOf = labels.map(label => named.includes(label) ? named.indexOf(label) : named.length);
  const names = others ? [...named, `other${by === "module" ? "s" : ` ${by}s`}`] : named;
  const colours = [...OKABE_ITO.slice(0, named.length), OTHER];
  return { colours, names: names.map((name, index) => ({ name, colour: colours[index] })), of: Uint8Array.from(numbers, number => colourOf[number]), label: null };
}

// [{name, colour, isWide}], names of at most `most` characters
function legend(place, names, most = 40) {
  place.replaceChildren(...names.map(({ name, colour, isWide }) =>
    element("span", { title: middle(name, 300) }, swatch(colour, isWide ? "wide" : ""), middle(name, most))));
}
