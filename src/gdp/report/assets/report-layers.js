// A strip of the model's layers in the colours of their devices, and which layers each device has.
const MOST_CELLS = 1200, SMALL_CELLS = 150, MOST_TOLD = 12;

// [L] {ns, ops, resident, byDevice}, as modules have them
function layerNodes(data) {
  const nodes = data.layers.map(name => new ModuleNode(name, name));
  for (let op = 0; op < data.module.length; op++) if (isShown(data.device[op])) nodes[data.layerOf[data.module[op]]]?.add(data, op);
  return nodes;
}

function showLayers(data, onLayers) {
  const nodes = layerNodes(data);
  if (isAbsent("layers-part", nodes.length < 2)) return;
  const runs = []; // of the layers of one list, or one other part
  nodes.forEach((node, layer) => {
    const last = runs[runs.length - 1];
    if (last && data.layerLists[layer] && last.list === data.layerLists[layer]) last.layers.push(layer);
    else runs.push({ list: data.layerLists[layer], name: data.layerLists[layer] || node.name, layers: [layer] });
  });
  const together = Math.ceil(nodes.length / MOST_CELLS), isSmall = nodes.length > SMALL_CELLS;
  const strip = element("div", { class: isSmall ? "strip small" : "strip", role: "group", "aria-label": "Layers in the colours of their devices; arrow keys go through them" });
  for (const run of runs) {
    const cells = element("div", { class: "cells" });
    for (let at = 0; at < run.layers.length; at += together) cells.append(layerCell(data, nodes, run.layers.slice(at, at + together), run.list, isSmall, onLayers));
    const width = Math.min(Math.max(cells.childElementCount * (isSmall ? 9 : 27), 96), 560);
    const style = run.list ? { flex: `${cells.childElementCount} 1 ${width}px` } : { flex: "1 1 108px", maxWidth: "180px" };
    strip.append(element("div", { class: "run", style }, element("div", { class: "caption", title: middle(run.name, 300) }, middle(run.name, 40)), cells));
  }
  strip.querySelector("button").setAttribute("tabindex", "0");
  strip.addEventListener("keydown", event => {
    const cells = [...strip.querySelectorAll("button")], at = cells.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: cells.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    if (cells[to]) moveFocus(cells[at], cells[to]);
  });
  const devices = deviceLegend(data, nodes);
  $("layers").replaceChildren(strip, shownDevices().length > MOST_TOLD ? element("details", {}, element("summary", {}, "Layers of each device"), devices) : devices);
  const split = nodes.filter(isSplit).length;
  if (split) $("layers").append(element("p", { class: "quiet" },
    `${split} of ${nodes.length} ${split === 1 ? "is" : "are"} on several devices: the heights of the colours are shares of the time.`));
}

// has more than 1 % of its time on a second device
const isSplit = node => node.split.length > 1 && node.byDevice[node.split[1]] > 0.01 * sum(node.byDevice);

function layerCell(data, nodes, layers, list, isSmall, onLayers) {
  const together = new ModuleNode("", "");
  for (const layer of layers) {
    const node = nodes[layer];
    together.ns += node.ns;
    together.ops += node.ops;
    together.resident += node.resident;
    node.byDevice.forEach((ns, device) => together.byDevice[device] += ns);
  }
  const stops = [];
  let height = 0;
  for (const { device, share } of together.shares) stops.push(`${deviceColour(device)} ${height}%`, `${deviceColour(device)} ${height += 100 * share}%`);
  const first = data.layers[layers[0]], last = layers[layers.length - 1];
  const name = layers.length > 1 ? `${middle(first, 80)} to ${layerLabel(data, last)}` : middle(first, 120);
  const told = `${name}: ${together.told(6)} of ${time(together.ns)}; ${count(together.ops, "op")}, ${bytes(together.resident)} of parameters and state`;
  const colour = deviceColour(together.device), background = stops.length > 2 ? `linear-gradient(to bottom, ${stops.join(", ")})` : colour;
  return element("button", { type: "button", class: "cell", tabindex: "-1", title: told, "aria-label": told, style: { background, color: inkOn(colour) },
    onclick: () => onLayers(name, new Set(layers)) }, list && !isSmall ? layerLabel(data, layers[0]) : "");
}

// each device with the layers that it has most of: "gpu0: embed, blocks 0 to 5"
function deviceLegend(data, nodes) {
  const place = element("div", { class: "legend" });
  const lists = new Set(data.layerLists.filter(Boolean));
  legend(place, shownDevices().map(number => {
    const device = summary.devices[number];
    const parts = [];
    let total = 0;
    for (let layer = 0; layer < nodes.length; layer++) {
      if (nodes[layer].device !== number || !nodes[layer].ops) continue;
      let end = layer + 1;
      while (end < nodes.length && data.layerLists[layer] && data.layerLists[end] === data.layerLists[layer] && nodes[end].device === number) end++;
      const list = lists.size > 1 && data.layerLists[layer] ? `${middle(data.layerLists[layer], 24)} ` : "";
      parts.push(`${list}${layerLabel(data, layer)}${end > layer + 1 ? `–${layerLabel(data, end - 1)}` : ""}`);
      total += end - layer;
      layer = end - 1;
    }
    if (!total) {
      const some = [...nodes.keys()].filter(layer => nodes[layer].byDevice[number] > 0).map(layer => middle(data.layers[layer], 30));
      parts.push(some.length > 3 ? `parts of ${some.length} layers` : some.length ? `part of ${some.join(", ")}` : "none");
    }
    const shown = parts.length > 8 ? count(total, "layer or module", "layers and modules") : parts.join(", ");
    return { name: `${middle(device.name, 24)}: ${shown}`, colour: deviceColour(number) };
  }), 300);
  return place;
}
