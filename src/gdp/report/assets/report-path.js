// The critical path: sums by layer and by kind, and a list of runs of ops of one module on one device, and transfers, with what each took.
const SUMS_FIRST = 10, PATH_FIRST = 12, PATH_PAGE = 100;
const HATCHED = "repeating-linear-gradient(45deg, #8d95a3 0 3px, transparent 3px 6px)"; // no device's colour

// [{from, until, isTransfer, device, label, items: [...]}]
function pathRuns(data) {
  const runs = [];
  let ended = 0;
  for (let at = 0; at < data.path.length; at++) {
    const number = data.path[at], isTransfer = number < 0, item = isTransfer ? -1 - number : number;
    const until = isTransfer ? data.arrival[item] : data.finish[item];
    const op = isTransfer ? data.sentBy[item] : item;
    const key = isTransfer ? `${data.from[item]}>${data.to[item]}` : `${data.device[op]} ${data.module[op]}`;
    const last = runs[runs.length - 1];
    if (last && last.isTransfer === isTransfer && last.key === key) {
      last.until = until;
      last.items.push(item);
    } else runs.push({ from: ended, until, isTransfer, key, op, after: data.pathAfter[at], items: [item], device: isTransfer ? data.from[item] : data.device[op], to: isTransfer ? data.to[item] : -1 });
    ended = until;
  }
  return runs;
}

// [[name, {ns, number}]] longest first: what the path spends on ops of each name, and on transfers
function pathSums(data, nameOf) {
  const sums = new Map();
  let ended = 0;
  for (const number of data.path) {
    const isTransfer = number < 0, item = isTransfer ? -1 - number : number;
    const until = isTransfer ? data.arrival[item] : data.finish[item], name = isTransfer ? "transfers" : nameOf(item);
    const entry = sums.get(name) ?? { ns: 0, number: 0 };
    entry.ns += until - ended;
    entry.number += 1;
    sums.set(name, entry);
    ended = until;
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
  const runs = pathRuns(data), step = Math.max(summary.step_ns, 1);
  const shares = new Map();
  for (const run of runs) {
    const name = run.isTransfer ? "transfers" : summary.devices[run.device].name;
    const entry = shares.get(name) ?? { ns: 0, colour: run.isTransfer ? HATCHED : deviceColour(run.device) };
    entry.ns += run.until - run.from;
    shares.set(name, entry);
  }
  const sorted = [...shares].sort((a, b) => b[1].ns - a[1].ns);
  const split = splitBar(sorted.map(([, { ns, colour }]) => ({ share: ns / step, colour })));
  const named = element("div", { class: "legend" });
  legend(named, sorted.map(([name, { ns, colour }]) => ({ name: `${middle(name, 30)} ${percent(ns / step)}`, colour })));
  $("path-shares").replaceChildren(split, named);
  const hasLayers = data.layers.length > 1;
  const partOf = hasLayers ? op => data.layers[data.layerOf[data.module[op]]] ?? "outside any layer" : op => data.modules[data.module[op]] || OUTSIDE;
  $("path-sums").replaceChildren(sumTable(hasLayers ? "By layer" : "By module", pathSums(data, partOf)), sumTable("By kind", pathSums(data, op => data.kinds[data.kind[op]])));
  const order = element("select", { "aria-label": "Order of the critical path" }, element("option", { value: "time" }, "as it runs"), element("option", { value: "length" }, "longest first"));
  const list = element("div"), more = element("button", { type: "button", id: "path-more" }, "more");
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
  order.addEventListener("change", begin);
  more.addEventListener("click", () => extend(PATH_PAGE));
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
  const show = element("button", { type: "button", title: "Show it in the timeline" }, "show");
  show.addEventListener("click", () => {
    showDevice(run.device);
    timeline.zoomTo(run.from - (run.until - run.from) * 0.5, run.until + (run.until - run.from) * 0.5);
    const row = timeline.rowOf(run.device);
    if (!run.isTransfer) timeline.choose(row, timeline.rows[row].items.indexOf(run.op), false);
    $("timeline-section").scrollIntoView();
  });
  return element("div", { class: "path-row" }, element("span", { class: "number" }, time(run.from)), element("span", { class: "number" }, `+ ${time(run.until - run.from)}`),
    element("span", {}, what, element("span", { class: "quiet" }, ` · ${WHY[run.after]} `), show));
}
