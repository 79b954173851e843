// Colours that colour-blind people tell apart: Okabe and Ito (2008), their black left to text; grey is all else.
const OKABE_ITO = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const OTHER = "#8d95a3";
const PHASES = { forward: 0, backward: 1, update: 2 };

const deviceColour = device => device < 7 ? OKABE_ITO[device] : device === 7 ? OTHER : mix(device);

// the colour of a line, which is thin: yellow is too light for white ground
const lineColour = device => deviceColour(device) === "#f0e442" && !isDark() ? "#a89b00" : deviceColour(device);

// more than eight devices: the same hues, darker
function mix(device) {
  const colour = parseInt(OKABE_ITO[device % 7].slice(1), 16), dark = 0.75 ** Math.min(Math.floor(device / 7), 4);
  const part = shift => Math.round(((colour >> shift) & 255) * dark).toString(16).padStart(2, "0");
  return `#${part(16)}${part(8)}${part(0)}`;
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

// {colours: [C], names: [C], of: Uint8Array [N]}: the colour of each op, the names of colours for the legend
function colouring(data, by) {
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
  return {
    colours: [...OKABE_ITO.slice(0, named.length), OTHER],
    names: others ? [...named, `other${by === "module" ? "s" : ` ${by}s`}`] : named,
    of: Uint8Array.from(numbers, number => colourOf[number]),
  };
}

function legend(place, names, colours) {
  place.replaceChildren(...names.map((name, index) => {
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = colours[index];
    return element("span", { title: middle(name, 300) }, swatch, middle(name, 40));
  }));
}
