// Rows of the timeline, and what is drawn of them: op by op where an op is a pixel wide, else one block a pixel.
const DIM = 64; // added to a colour's number: not among what is searched for

const BAND = 26, LOW_BAND = 8, MOST_CHANNELS = 64;

// {rows, bands: names of the bands in which they are, band: height of one}: a row for each device, a low one under it for
// its host, and one for each channel or, folded, a low one under each device with what that device sends.
// A row is {name, isDevice, items, starts, ends, latest, top, height}; items are numbers of ops or transfers, by start.
// A device's row with a host has `waiting`: from where the device takes each op, which the host may have to issue first.
function layOut(data, isFolded) {
  const hasHosts = data.taken.length > 0, hasSent = isFolded && data.lanes.length > 0;
  const low = hasHosts ? BAND + LOW_BAND : BAND, band = hasSent ? low + LOW_BAND : low;
  const devices = shownDevices();
  const rows = devices.map((number, at) => {
    const { name } = summary.devices[number], items = data.order.subarray(data.orderOffsets[number], data.orderOffsets[number + 1]);
    return { ...lane(name, true, items, data.start, data.finish), device: number, top: band * at + 2, height: 21,
      waiting: hasHosts ? lane(name, true, items, data.taken, data.finish) : null };
  });
  if (hasHosts) rows.push(...rows.map(row => ({ ...lane(`host of ${row.name}`, false, row.items, data.issueStart, data.issueEnd), of: row, top: row.top + 23, height: 6 })));
  const bands = devices.map(number => summary.devices[number].name);
  if (isFolded) {
    const sent = sentByDevice(data);
    devices.forEach((device, at) => sent[device].length &&
      rows.push({ ...lane(`from ${summary.devices[device].name}`, false, sent[device], data.sentStart, data.sentEnd), top: band * (at + 1) - LOW_BAND - 1, height: 6 }));
    return { rows, bands, band };
  }
  const isSeen = sent => isShown(data.from[sent]) || isShown(data.to[sent]);
  const lanes = data.lanes.map((_, number) => data.laneTransfers.subarray(data.laneOffsets[number], data.laneOffsets[number + 1]).filter(isSeen));
  const busiest = new Set([...lanes.keys()].filter(number => lanes[number].length).sort((a, b) => lanes[b].length - lanes[a].length).slice(0, MOST_CHANNELS));
  data.lanes.forEach((name, number) => {
    if (!busiest.has(number)) return;
    const items = lanes[number];
    rows.push({ ...lane(name, false, items, data.sentStart, data.sentEnd), top: band * bands.length + 6, height: 14 });
    bands.push(name);
  });
  return { rows, bands, band };
}

// the transfers from each device, by start
function sentByDevice(data) {
  if (!data.sentByDevice) {
    data.sentByDevice = summary.devices.map(() => []);
    for (const transfer of [...data.sentStart.keys()].sort((a, b) => data.sentStart[a] - data.sentStart[b])) data.sentByDevice[data.from[transfer]].push(transfer);
  }
  return data.sentByDevice;
}

// Stretches of a device's row with one label and colour: {starts, ends, labels, colours}; short idle times do not end one.
function stretches(row, colourOf, labelOf) {
  const starts = [], ends = [], labels = [], colours = [];
  let last = -1;
  for (let index = 0; index < row.items.length; index++) {
    const op = row.items[index], from = row.starts[index], until = row.ends[index];
    if (until === from) continue;
    const label = labelOf(op), colour = colourOf(op);
    if (last >= 0 && labels[last] === label && colours[last] === colour && from - ends[last] <= 0.1 * (ends[last] - starts[last])) ends[last] = until;
    else {
      last = starts.push(from) - 1;
      ends.push(until);
      labels.push(label);
      colours.push(colour);
    }
  }
  return { starts, ends, labels, colours };
}

// the names of the channels that a transfer occupies
const channelsOf = (data, transfer) => data.lanes.filter((_, number) =>
  data.laneTransfers.subarray(data.laneOffsets[number], data.laneOffsets[number + 1]).includes(transfer)).join(", ");

function lane(name, isDevice, items, from, until) {
  const starts = new Float64Array(items.length), ends = new Float64Array(items.length), latest = new Float64Array(items.length);
  let last = 0;
  for (let index = 0; index < items.length; index++) {
    starts[index] = from[items[index]];
    ends[index] = until[items[index]];
    latest[index] = last = Math.max(last, ends[index]);
  }
  return { name, isDevice, items, starts, ends, latest };
}

// What to draw from `low` to `high` ns: for each colour a list of (x, width, share of the height); x = offset + scale * ns.
function blocks(row, colourOf, low, high, offset, scale) {
  const drawn = new Map();
  const put = (colour, x, width, share) => {
    let list = drawn.get(colour);
    if (list === undefined) drawn.set(colour, list = []);
    const end = list.length;
    if (end && width <= 1 && list[end - 3] + list[end - 2] === x && Math.abs(list[end - 1] - share) < 0.15) list[end - 2] += width;
    else list.push(x, width, share);
  };
  const busy = new Float64Array(2 * DIM + 1), touched = [];
  let pixel = -1, total = 0;
  const flush = () => {
    if (pixel < 0) return;
    let most = touched[0];
    for (const colour of touched) if (busy[colour] > busy[most]) most = colour;
    put(most, pixel, 1, Math.min(1, Math.max(0.25, total)));
    for (const colour of touched) busy[colour] = 0;
    touched.length = 0;
    total = 0;
    pixel = -1;
  };
  const { starts, ends, items } = row;
  const stop = above(starts, high);
  for (let index = above(row.latest, low); index < stop; index++) {
    const x = offset + scale * starts[index], width = scale * (ends[index] - starts[index]);
    const colour = colourOf(items[index]);
    if (width >= 1) {
      flush();
      put(colour, x, width, 1);
      continue;
    }
    const here = Math.floor(x);
    if (here !== pixel) {
      flush();
      pixel = here;
    }
    if (busy[colour] === 0) touched.push(colour);
    busy[colour] += width + 1e-9;
    total += width;
  }
  flush();
  return drawn;
}

// the index in `row.items` of what is at `ns`, at most `near` ns off; -1 if nothing is
function itemAt(row, ns, near) {
  let best = -1, distance = near;
  const stop = above(row.starts, ns + near);
  for (let index = above(row.latest, ns - near); index < stop; index++) {
    const off = Math.max(row.starts[index] - ns, ns - row.ends[index], 0);
    if (off < distance || (off === 0 && distance >= 0)) {
      best = index;
      distance = off;
      if (off === 0) break;
    }
  }
  return best;
}
