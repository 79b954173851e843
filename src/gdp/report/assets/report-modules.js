const OUTSIDE = "outside any module"; // ops of the model's own inputs, results and updates

// The tree of modules, each with its time and the share that each device has of it.
class ModuleNode {
  constructor(name, path) {
    this.name = name;
    this.path = path;
    this.children = new Map();
    this.ns = 0;
    this.ops = 0;
    this.resident = 0;
    this.byDevice = new Float64Array(summary.devices.length);
  }

  add(data, op) {
    const ns = data.finish[op] - data.start[op];
    this.ns += ns;
    this.ops += 1;
    this.resident += data.resident[op];
    this.byDevice[data.device[op]] += ns || 1e-3; // an op without time is somewhere too
  }

  get split() {
    return [...this.byDevice.keys()].filter(device => this.byDevice[device] > 0).sort((a, b) => this.byDevice[b] - this.byDevice[a]);
  }

  // [{device, share: of its time}], the largest first
  get shares() {
    const all = sum(this.byDevice);
    return this.split.map(device => ({ device, share: this.byDevice[device] / all }));
  }

  // the first shares in words
  told(most, separator = ", ") {
    return this.shares.slice(0, most).map(({ device, share }) => `${middle(summary.devices[device].name, 30)} ${percent(share)}`).join(separator);
  }

  // the device with most of its time
  get device() {
    return this.byDevice.indexOf(Math.max(...this.byDevice));
  }
}

// {root, lines: for each module number the nodes from the root to its own}
function moduleTree(data) {
  const root = new ModuleNode("", "");
  const lines = data.modules.map(module => {
    const line = [root];
    for (const part of module === "" ? [OUTSIDE] : module.split(".").slice(0, 60)) {
      const node = line[line.length - 1];
      if (!node.children.has(part)) node.children.set(part, new ModuleNode(part, node.path ? `${node.path}.${part}` : part));
      line.push(node.children.get(part));
    }
    return line;
  });
  for (let op = 0; op < data.module.length; op++) {
    if (isShown(data.device[op])) for (const node of lines[data.module[op]]) node.add(data, op);
  }
  return { root, lines };
}

function showModules(tree, onSearch) {
  const total = Math.max(tree.root.ns, 1);
  legend($("modules-legend"), shownDevices().map(number => ({ name: summary.devices[number].name, colour: deviceColour(number) })));
  const fill = (place, node, level) => {
    const children = [...node.children.values()].filter(child => child.ops).sort((a, b) => b.ns - a.ns);
    for (const child of children.slice(0, 200)) place.append(moduleRow(child, level, total, fill, onSearch));
    if (children.length > 200) place.append(element("div", { class: "quiet" }, `and ${count(children.length - 200, "smaller module")}`));
  };
  let root = tree.root, lead = [];
  while (root.children.size === 1 && [...root.children.values()][0].children.size) {
    root = [...root.children.values()][0];
    lead.push(root);
  }
  const place = $("modules");
  place.replaceChildren();
  fill(place, tree.root, 1);
  // modules that hold all others are open
  for (let at = 0; at < lead.length && at < 5; at++) [...place.querySelectorAll("[aria-expanded=false]")][0]?.click();
  place.querySelector(".node")?.setAttribute("tabindex", "0");
  place.onkeydown = event => moduleKey(place, event);
}

function moduleRow(node, level, total, fill, onSearch) {
  const bar = splitBar(node.shares.map(({ device, share }) => ({ share, colour: deviceColour(device) })), node.told(8));
  bar.title = node.told(8);
  const hasChildren = node.children.size > 0;
  const label = element("div", { class: "label", title: `${middle(node.path, 300)}: ${count(node.ops, "op")}, ${bytes(node.resident)} of parameters and state` },
    hasChildren ? "▸ " : "\u2003", middle(node.name, 80));
  const line = element("div", { class: "node", role: "treeitem", "aria-level": level, tabindex: "-1", ...(hasChildren ? { "aria-expanded": "false" } : {}) },
    label, element("div", { class: "time" }, percent(node.ns / total)), bar);
  const holder = element("div", {}, line);
  line.addEventListener("click", () => {
    if (!hasChildren) return onSearch(node.path);
    const isOpen = line.getAttribute("aria-expanded") === "true";
    line.setAttribute("aria-expanded", String(!isOpen));
    label.firstChild.textContent = isOpen ? "▸ " : "▾ ";
    if (isOpen) holder.lastChild.remove();
    else {
      const children = element("div", { class: "children", role: "group" });
      fill(children, node, level + 1);
      holder.append(children);
    }
  });
  return holder;
}

const sum = values => values.reduce((a, b) => a + b, 0);

// as in any tree: up and down go through what is seen, right opens, left closes or goes to the parent
function moduleKey(place, event) {
  const shown = [...place.querySelectorAll(".node")], at = shown.indexOf(document.activeElement);
  if (at < 0) return;
  const line = shown[at], expanded = line.getAttribute("aria-expanded");
  const go = to => to && moveFocus(line, to);
  const actions = {
    ArrowDown: () => go(shown[at + 1]), ArrowUp: () => go(shown[at - 1]), Home: () => go(shown[0]), End: () => go(shown[shown.length - 1]),
    ArrowRight: () => expanded === "false" ? line.click() : expanded === "true" && go(shown[at + 1]),
    ArrowLeft: () => expanded === "true" ? line.click() : go(line.parentElement.parentElement.closest(".children")?.parentElement.firstChild),
    Enter: () => line.click(), " ": () => line.click(),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}
