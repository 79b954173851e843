// The critical path: sums by layer and by kind, and a list of runs of ops of one module on one device, and transfers, with what each took.
const SUMS_FIRST = 10, PATH_FIRST = 12, PATH_PAGE = 100;

// [{op, isTransfer, item, after, from, until}], each from the end of the one before; the op of a transfer makes its tensor
function pathSteps(data) {
  let from = 0;
  return Array.from(data.path, (number, at) => {
    const isTransfer = number < 0, item = isTransfer ? -1 - number : number;
    const step = { op: isTransfer ? data.sentBy[item] : item, isTransfer, item, after: data.pathAfter[at], from };
    return { ...step, until: from = isTransfer ? data.arrival[item] : data.finish[item] };
  });
}

// the steps of one module on one device, or of one way, together: [{...the first step, until, key, items, device, to}]
function pathRuns(data, steps) {
  const runs = [];
  for (const step of steps) {
    const device = data.device[step.op], to = step.isTransfer ? data.to[step.item] : -1;
    const key = step.isTransfer ? `${device}>${to}` : `${device} ${data.module[step.op]}`;
    const last = runs[runs.length - 1];
    if (last?.key === key) {
      last.until = step.until;
      last.items.push(step.item);
    } else runs.push({ ...step, key, items: [step.item], device, to });
  }
  return runs;
}

// [[name, {ns, number}]] longest first: what the path spends on ops of each name, and on transfers
function pathSums(steps, nameOf) {
  const sums = new Map();
  for (const { isTransfer, item, from, until } of steps) {
    const name = isTransfer ? "transfers" : nameOf(item), entry = sums.get(name) ?? { ns: 0, number: 0 };
    sums.set(name, { ns: entry.ns + until - from, number: entry.number + 1 });
  }
  return [...sums].sort((a, b) => b[1].ns - a[1].ns);
}

function sumTable(title, sums) {
  const step = Math.max(summary.step_ns, 1), longest = Math.max(sums[0]?.[1].ns ?? 0, 1);
  const rows = sums.slice(0, SUMS_FIRST), rest = sums.slice(SUMS_FIRST);
  if (rest.length) rows.push([`${count(rest.length, "other")}`, { ns: sum(rest.map(entry => entry[1].ns)), number: sum(rest.map(entry => entry[1].number)) }]);
  return element("div", {}, element("h3", {}, title), table(["", "", ">of the step", ">time", ">number"],
    rows.map(([name, { ns, number }]) => ({ cells: [middle(name || "–", 36), bar(ns / longest, "var(--plan)"), percent(ns / step), time(ns), number.toLocaleString("en")] }))));
}

function showPath(data, timeline) {
  const steps = pathSteps(data), runs = pathRuns(data, steps), step = Math.max(summary.step_ns, 1);
  const shares = pathSums(steps, op => data.device[op]).map(([device, { ns }]) => ({ share: ns / step,
    name: device === "transfers" ? device : middle(summary.devices[device].name, 30), colour: device === "transfers" ? HATCHED : deviceColour(device) }));
  const named = element("div", { class: "legend" });
  legend(named, shares.map(({ name, share, colour }) => ({ name: `${name} ${percent(share)}`, colour })));
  $("path-shares").replaceChildren(splitBar(shares), named);
  const hasLayers = data.layers.length > 1;
  const partOf = hasLayers ? op => data.layers[data.layerOf[data.module[op]]] ?? "outside any layer" : op => data.modules[data.module[op]] || OUTSIDE;
  $("path-sums").replaceChildren(sumTable(hasLayers ? "By layer" : "By module", pathSums(steps, partOf)), sumTable("By kind", pathSums(steps, op => data.kinds[data.kind[op]])));
  const order = element("select", { "aria-label": "Order of the critical path", onchange: () => begin() },
    element("option", { value: "time" }, "as it runs"), element("option", { value: "length" }, "longest first"));
  const list = element("div"), more = element("button", { type: "button", id: "path-more", onclick: () => extend(PATH_PAGE) }, "more");
  const longest = [...runs].sort((a, b) => (b.until - b.from) - (a.until - a.from));
  let listed, shown;
  const extend = number => {
    for (const run of listed.slice(shown, shown + number)) list.append(pathRow(data, run, timeline));
    shown = Math.min(shown + number, listed.length);
    more.hidden = shown === listed.length;
    more.textContent = `${Math.min(PATH_PAGE, listed.length - shown)} more of ${listed.length.toLocaleString("en")}`;
  };
  const begin = () => {
    listed = order.value === "time" ? runs : longest;
    list.replaceChildren();
    shown = 0;
    extend(PATH_FIRST);
  };
  const number = `${count(data.path.length, "op or transfer", "ops and transfers")} one after the other, in ${count(runs.length, "run")} of one module or way`;
  const all = element("details", runs.length <= PATH_FIRST ? { open: "" } : {}, element("summary", {}, number), element("div", { class: "tools" }, order), list, more);
  $("path").replaceChildren(all);
  begin();
}

const WHY = ["at the start", "when its input was made", "when its input came", "when the device was free", "when the channel was free"];

function pathRow(data, run, timeline) {
  const what = run.isTransfer
    ? `${middle(summary.devices[run.device].name, 30)} → ${middle(summary.devices[run.to].name, 30)}: ${run.items.length > 1 ? `${run.items.length} transfers, first ` : ""}output of ${middle(nameOf(data, run.op), 80)}`
    : `${middle(summary.devices[run.device].name, 30)}: ${run.items.length > 1 ? `${count(run.items.length, "op")} of ${middle(data.modules[data.module[run.op]] || "no module", 80)}, first ` : ""}${middle(nameOf(data, run.op), 80)}`;
  const show = showButton(() => {
    showDevice(run.device);
    timeline.bringUp(run.from, run.until, 0.5);
    const row = timeline.rowOf(run.device);
    if (!run.isTransfer) timeline.choose(row, timeline.rows[row].items.indexOf(run.op), false);
  });
  return element("div", { class: "path-row" }, element("span", { class: "number" }, time(run.from)), element("span", { class: "number" }, `+ ${time(run.until - run.from)}`),
    element("span", {}, what, element("span", { class: "quiet" }, ` · ${WHY[run.after]} `), show));
}
