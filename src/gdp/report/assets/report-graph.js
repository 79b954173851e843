// The graph of modules: nodes coloured by device, from left to right as they run; a click opens a module.
const MOST_NODES = 60, AT_FIRST = [8, 16], LAYERS_AT_FIRST = [26, 50], MOST_BUTTONS = 20;

class GraphView {
  constructor(data, tree) {
    this.data = data;
    this.forward = data.phases.indexOf("forward");
    this.take(tree);
    this.chart = chart("graph", this.height, width => this.option(width));
    this.chart.on("click", event => event.dataType === "node" && this.toggle(this.nodes[event.dataIndex].node));
  }

  // the modules to draw
  take(tree) {
    this.tree = tree;
    this.closeAll();
    this.spread();
    this.build();
  }

  show(tree) {
    this.change(() => this.take(tree));
  }

  // as high as its bands of devices, few nodes less
  get height() {
    const devices = new Set(this.nodes.map(node => node.device)).size;
    return Math.min(110 + Math.max(40 * devices, this.nodes.length > 6 ? 110 : 50), 460);
  }

  // what holds all else is always open
  closeAll() {
    this.open = new Set([this.tree.root]);
    let node = this.tree.root;
    while (node.children.size === 1) this.open.add(node = [...node.children.values()][0]);
    this.always = new Set(this.open);
    this.last = node;
  }

  // opens what holds layers, then the longest modules, as long as few are seen
  spread() {
    const isWide = Number(!isNarrow(innerWidth)), holding = new Set();
    for (const layer of this.data.layers) for (let end = layer.lastIndexOf("."); end > 0; end = layer.lastIndexOf(".", end - 1)) holding.add(layer.slice(0, end));
    const most = node => (holding.has(node.path) ? LAYERS_AT_FIRST : AT_FIRST)[isWide];
    let seen = [...this.last.children.values()];
    for (;;) {
      const next = seen.filter(node => node.children.size && seen.length + node.children.size - 1 <= most(node))
        .sort((a, b) => holding.has(b.path) - holding.has(a.path) || b.ns - a.ns)[0];
      if (!next) return;
      this.open.add(next);
      seen = [...seen.filter(node => node !== next), ...next.children.values()];
    }
  }

  change(action) {
    const focused = document.activeElement, hadFocus = $("graph-buttons").contains(focused), key = focused.dataset.path;
    action();
    this.build();
    resized(this.chart, this.height);
    if (!hadFocus) return;
    const buttons = [...$("graph-buttons").querySelectorAll("button")];
    (buttons.find(button => button.dataset.path === key) ?? buttons[0]).focus();
  }

  toggle(node) {
    if (!node.children.size) return;
    this.change(() => this.open.has(node) ? this.close(node) : this.open.add(node));
  }

  // with all in it
  close(node) {
    this.open.delete(node);
    for (const child of node.children.values()) this.close(child);
  }

  // the visible node of each module, and what goes between them
  build() {
    const data = this.data, index = new Map(), seen = [];
    const nodeOf = this.tree.lines.map(nodes => nodes.find(node => !this.open.has(node)) ?? nodes[nodes.length - 1]);
    const numberOf = Int32Array.from(nodeOf, node => {
      if (!index.has(node)) {
        index.set(node, seen.length);
        seen.push(node);
      }
      return index.get(node);
    });
    // when a module runs on the way forward: the mean over its ops there, by their times; without any, over all
    const first = seen.map(() => [0, 0, 0, 0]);
    // of an open module only what is in none of its children
    const parts = seen.map(node => Object.assign(new ModuleNode(node.name, this.open.has(node) ? `${node.path}: its own ops` : node.path), { node }));
    for (let op = 0; op < data.module.length; op++) {
      if (!isShown(data.device[op])) continue;
      const number = numberOf[data.module[op]], totals = first[number], ns = data.finish[op] - data.start[op] + 1e-3;
      parts[number].add(data, op);
      const at = data.phase[op] === this.forward ? 0 : 2;
      totals[at] += ns * data.start[op];
      totals[at + 1] += ns;
    }
    const meanStart = node => first[node][1] ? first[node][0] / first[node][1] : first[node][2] / Math.max(first[node][3], 1e-3);
    const order = [...seen.keys()].filter(number => parts[number].ops).sort((a, b) => parts[b].ns - parts[a].ns).slice(0, MOST_NODES).sort((a, b) => meanStart(a) - meanStart(b));
    const rank = new Int32Array(seen.length).fill(-1);
    order.forEach((node, at) => rank[node] = at);
    this.hidden = parts.filter(part => part.ops).length - order.length;
    this.nodes = order.map(number => parts[number]);
    const flows = new Map();
    for (let edge = 0; edge < data.edgeFrom.length; edge++) {
      if (!isShown(data.device[data.edgeFrom[edge]])) continue;
      const a = rank[numberOf[data.module[data.edgeFrom[edge]]]], b = rank[numberOf[data.module[data.edgeTo[edge]]]];
      if (a < 0 || b < 0 || a === b) continue;
      const key = a < b ? a * MOST_NODES + b : b * MOST_NODES + a;
      flows.set(key, (flows.get(key) || 0) + data.edgeBytes[edge]);
    }
    this.flows = [...flows].sort((a, b) => b[1] - a[1]).slice(0, 300);
    const opened = [...this.open].filter(node => !this.always.has(node)), closed = this.nodes.map(part => part.node).filter(node => node.children.size && !this.open.has(node));
    $("graph-buttons").replaceChildren(
      element("button", { type: "button", onclick: () => this.change(() => this.closeAll()) }, "close all"),
      ...[...opened, ...closed].slice(0, MOST_BUTTONS).map(node => element("button", { type: "button", title: middle(node.path, 200), "data-path": node.path,
        "aria-expanded": String(this.open.has(node)), onclick: () => this.toggle(node) }, `${this.open.has(node) ? "▾" : "▸"} ${middle(node.path, 28)}`)),
      element("span", { class: "quiet" }, this.hidden ? `${count(this.hidden, "smaller module")} not drawn` : ""));
  }

  option(width) {
    const most = Math.max(...this.nodes.map(node => node.ns), 1), widest = Math.max(...this.flows.map(flow => flow[1]), 1);
    // in pixels: each device has a band, in which neighbours stand at different heights
    const devices = [...new Set(this.nodes.map(node => node.device))].sort((a, b) => a - b);
    const across = Math.max(this.nodes.length - 1, 1), band = (this.height - 110) / devices.length;
    const spots = this.nodes.map((node, at) => [at / across * (width - 150), band * (devices.indexOf(node.device) + [0.25, 0.75, 0.5, 1][at % 4])]);
    return {
      tooltip: { ...tipLook(), formatter: item => item.dataType === "edge" ? bytes(item.data.bytes) : this.nodeTip(this.nodes[item.dataIndex]) },
      series: [{ type: "graph", layout: "none", roam: "move", left: 75, right: 75, top: 50, bottom: 60, preserveAspect: "contain",
        label: { show: true, position: "bottom", color: css("--text"), fontSize: 11, formatter: item => middle(this.nodes[item.dataIndex].path, isNarrow(width) ? 12 : 24) },
        labelLayout: { hideOverlap: true },
        lineStyle: { color: css("--quiet") }, emphasis: { focus: "adjacency" },
        data: this.nodes.map((node, at) => ({ id: String(at), name: String(at), x: spots[at][0], y: spots[at][1],
          symbol: node.node.children.size ? "roundRect" : "circle", symbolSize: 12 + 34 * Math.sqrt(node.ns / most),
          itemStyle: { color: shares(node), borderColor: css("--text"), borderWidth: node.node.children.size ? 1.5 : 0 } })),
        links: this.flows.map(([key, size]) => {
          const source = Math.floor(key / MOST_NODES), target = key % MOST_NODES;
          const far = Math.hypot(spots[source][0] - spots[target][0], spots[source][1] - spots[target][1]);
          return { source, target, bytes: size, // bent by at most 40 pixels
            lineStyle: { width: 0.6 + 7 * Math.sqrt(size / widest), opacity: 0.45, curveness: Math.min(0.18, 80 / Math.max(far, 1)) } };
        }) }],
    };
  }

  nodeTip(node) {
    return [middle(node.path, 80), `${time(node.ns)}, ${count(node.ops, "op")}, ${bytes(node.resident)} held`, node.told(8, "\n")].join("\n");
  }
}

// the colours of a module's devices side by side, as wide as their shares
function shares(node) {
  const colorStops = [];
  let offset = 0;
  for (const { device, share } of node.shares) {
    const color = deviceColour(device), from = offset;
    offset = Math.min(offset + share, 1);
    colorStops.push({ offset: from, color }, { offset, color });
  }
  return { type: "linear", x: 0, y: 0, x2: 1, y2: 0, colorStops };
}
