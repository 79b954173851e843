// Which replica is shown, how copies are named, the exchanges between replicas, and the layout.
const MOST_LAYOUTS = 12;
const shown = { replica: summary.alike ? 0 : null }; // null: all of them

const isShown = device => shown.replica === null || summary.devices[device].replica === shown.replica;
const shownDevices = () => [...summary.devices.keys()].filter(isShown);

// the micro-batch and the replica of an op, "" for what has none
const microbatchOf = (data, op) => data.microbatch.length && data.microbatch[op] >= 0 ? String(data.microbatch[op])
  : data.nameMicrobatch.length && data.nameMicrobatch[op] ? String(data.nameMicrobatch[op]) : "";
const replicaOf = (data, op) => data.replica.length ? String(data.replica[op]) : "";

// "layers.3.mm (micro-batch 1, replica 2)"
function nameOf(data, op) {
  const of = [["micro-batch", microbatchOf(data, op)], ["replica", replicaOf(data, op)]].filter(part => part[1] !== "");
  const name = data.names[data.name[op]];
  return of.length ? `${name} (${of.map(part => part.join(" ")).join(", ")})` : name;
}

// what ZeRO cuts of an op
function cutOf(data, op) {
  const layout = summary.layout, share = layout && `one of ${layout.replicas} parts`;
  if (!layout?.zero) return "";
  if (data.phases[data.phase[op]] === "update") return `${share} of the update`;
  if (data.kinds[data.kind[op]] !== "parameter") return "";
  return layout.zero === 3 ? `${share} of parameter and optimizer state` : `${share} of the optimizer state`;
}

// the choice between one replica and all; `onChange` is called after it
function replicaTools(onChange) {
  const tools = $("replica-tools");
  tools.hidden = summary.replicas < 2;
  if (tools.hidden) return;
  const options = [...Array(summary.replicas).keys()].map(number => element("option", { value: String(number) }, `replica ${number}`));
  const select = element("select", { id: "replica", onchange: () => show(select.value === "all" ? null : Number(select.value)) },
    ...options, element("option", { value: "all" }, "all replicas"));
  const told = element("span", { class: "quiet" });
  const tell = () => {
    select.value = shown.replica === null ? "all" : String(shown.replica);
    const names = shownDevices().map(device => middle(summary.devices[device].name, 24));
    told.textContent = (shown.replica === null ? "All devices." : `On ${names.length > 6 ? `${names[0]} to ${names[names.length - 1]}` : names.join(", ")}.`)
      + (summary.alike ? ` The ${summary.replicas} replicas are placed alike.` : " Not all replicas are placed alike.");
  };
  const show = replica => {
    shown.replica = replica;
    tell();
    onChange();
  };
  tools.replaceChildren(element("label", {}, "Show ", select), told);
  tell();
  shown.show = show;
}

// makes a device visible that is not
function showDevice(device) {
  if (isShown(device)) return;
  const replica = summary.devices[device].replica;
  shown.show(replica < 0 ? null : replica);
}

const showButton = onclick => element("button", { type: "button", class: "small-button", title: "Show it in the timeline", onclick }, "show");

// means over the devices that are shown and take part: [share of the step under way, share of it that nothing hides]
function exchangeShares(times) {
  const own = shownDevices().map(device => times[device]).filter(pair => pair[0]), step = Math.max(summary.step_ns, 1);
  return [0, 1].map(part => own.length ? sum(own.map(pair => pair[part])) / own.length / step : 0);
}

function exchanges(timeline) {
  const found = summary.exchanges;
  if (isAbsent("exchanges-part", !found)) return;
  const hasMicrobatches = found.listed.some(row => row.microbatch);
  const headings = ["exchange", "pass", ">number", ">bytes, all devices", ">under way", ">not hidden", ""];
  const cells = (name, phase, number, size, times) => {
    const [flight, bare] = exchangeShares(times), step = summary.step_ns;
    const both = element("div", { class: "bar", title: `${percent(flight)} of the step under way, ${percent(bare)} not hidden behind compute` },
      ...[[flight, "var(--bar)"], [bare, "var(--bad)"]].map(([share, background]) =>
        element("i", { class: "over", style: { width: `${100 * Math.min(share, 1)}%`, background } })));
    return [name, phase, number, size, `${time(flight * step, 3)}, ${percent(flight)}`, `${time(bare * step, 3)}, ${percent(bare)}`, both];
  };
  const rows = found.kinds.map(kind => ({ cells: cells(kind.name, kind.phase, kind.number.toLocaleString("en"), bytes(kind.bytes), kind.devices) }));
  if (rows.length > 1) rows.push({ chosen: true, cells: cells("all", "", sum(found.kinds.map(kind => kind.number)).toLocaleString("en"), bytes(sum(found.kinds.map(kind => kind.bytes))), found.devices) });
  const name = device => middle(summary.devices[device].name, 24);
  const rings = found.rings.filter(ring => ring.some(isShown));
  const listed = found.listed.map(row => ({ cells: [row.name, row.phase, ...(hasMicrobatches ? [String(row.microbatch)] : []), bytes(row.bytes), time(row.from), time(row.until - row.from), time(row.bare),
    showButton(() => timeline.bringUp(row.from, row.until, 0.2))] }));
  const one = element("details", {}, element("summary", {}, `One by one, the least hidden first`),
    table(["exchange", "pass", ...(hasMicrobatches ? [">micro-batch"] : []), ">bytes", ">from", ">takes",
      ">not hidden", ""], listed),
    found.more ? element("p", { class: "quiet" }, `and ${count(found.more, "more")}`) : "");
  $("exchanges").replaceChildren(table(headings, rows),
    ...rings.slice(0, 8).map(ring => element("p", {}, "Ring: ", ...[...ring, ring[0]].map((device, at) =>
      element("span", {}, at ? " → " : "", swatch(deviceColour(device), "inline"), name(device))))),
    rings.length > 8 ? element("p", { class: "quiet" }, `and ${count(rings.length - 8, "ring")} more`) : "", one);
}

// the layouts that were looked at
function layouts() {
  const rows = summary.layout?.rows ?? [];
  if (isAbsent("layouts-part", !rows.length)) return;
  const longest = Math.max(...rows.slice(0, MOST_LAYOUTS).map(row => row.ns ?? 0), 1);
  const headings = ["layout", ">replica on", ">step time", "", ">of the plan's", ">fullest device", "limit"];
  const made = rows.map(row => {
    const colour = row.status === "does not fit" ? NOT_FITTING : row.plan ? "var(--plan)" : "var(--bar)";
    return { chosen: row.plan, cells: [middle(row.option, 60), count(row.devices, "device"),
      ...timeCells(row.ns, longest, colour, summary.layout.bound_ns || null, row.status === "estimated"), row.fullest === null ? "–" : bytes(row.fullest), middle(row.limit, 120)] };
  });
  const rest = made.length > MOST_LAYOUTS ? [element("details", {}, element("summary", {}, `${made.length - MOST_LAYOUTS} more`), table(headings, made.slice(MOST_LAYOUTS)))] : [];
  $("layouts").replaceChildren(table(headings, made.slice(0, MOST_LAYOUTS)), ...rest,
    ...summary.layout.notes.map(note => element("p", {}, `${note[0].toUpperCase()}${note.slice(1)}.`)), element("p", { class: "quiet" },
    `~ is an estimate, made from one replica.${summary.layout.bound_ns ? ` The line in each bar is the bound of any layout, ${time(summary.layout.bound_ns)}.` : ""}`));
}
