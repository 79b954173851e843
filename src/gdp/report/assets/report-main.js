// Puts the page together.
async function main() {
  const theme = $("theme");
  theme.addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  cards();
  advice();
  layouts();
  const data = await unpack($("columns").textContent);
  $("columns").remove();
  $("colour").append(...colourings(data).map(by => element("option", { value: by }, by)));
  const onLayers = (name, layers) => find(timeline, name, op => layers.has(data.layerOf[data.module[op]]));
  let memory = null, graph = null;
  replicaTools(() => {
    showLayers(data, onLayers);
    timeline.show();
    memory?.show();
    exchanges(timeline);
    const tree = moduleTree(data);
    showModules(tree, onModule);
    graph?.show(tree);
  });
  showLayers(data, onLayers);
  const timeline = new Timeline(data, view => memory?.zoomTo(view));
  const onModule = path => path === OUTSIDE ? find(timeline, path, op => data.modules[data.module[op]] === "") : find(timeline, path);
  controls(timeline);
  exchanges(timeline);
  performance.mark("timeline-drawn");
  await new Promise(done => setTimeout(done)); // what is on the screen first is painted first
  progress(); // leaves its place to the placers where nothing is known of the search
  placers();
  measured();
  memory = new MemoryChart(data);
  showPath(data, timeline);
  const tree = moduleTree(data);
  showModules(tree, onModule);
  graph = new GraphView(data, tree);
  let timer = 0;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a telephone's address bar comes and goes
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(redraw, 100);
  });
  printing();
  window.gdpReport = { data, timeline, memory, graph, tree }; // for scripts, and for the tests
  document.documentElement.dataset.ready = "true";
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  redraw();
}

function find(timeline, text, isWanted = null) {
  $("search").value = $("search").dataset.last = text;
  timeline.search(text, isWanted);
  $("timeline-section").scrollIntoView();
}

function controls(timeline) {
  $("colour").addEventListener("change", event => {
    timeline.colour(event.target.value);
    timeline.redraw();
  });
  $("fold").hidden = !timeline.data.lanes.length;
  $("fold").addEventListener("click", () => {
    timeline.fold(!timeline.isFolded);
    $("fold").setAttribute("aria-pressed", String(!timeline.isFolded));
  });
  const search = $("search");
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => timeline.search(search.value), 120);
  });
  search.addEventListener("keydown", event => {
    if (event.key === "Enter") {
      clearTimeout(timer);
      if (search.value !== search.dataset.last) timeline.search(search.value);
      search.dataset.last = search.value;
      timeline.showFound(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      search.value = search.dataset.last = "";
      timeline.search("");
      timeline.place.focus();
    }
  });
  const clicks = {
    "found-before": () => timeline.showFound(-1), "found-next": () => timeline.showFound(1),
    "zoom-in": () => timeline.zoom(0.5), "zoom-out": () => timeline.zoom(2), "zoom-all": () => timeline.zoomTo(0, timeline.step),
  };
  for (const [id, action] of Object.entries(clicks)) $(id).addEventListener("click", action);
  document.addEventListener("keydown", event => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
    event.preventDefault();
    search.focus();
    search.select();
  });
  document.addEventListener("keydown", event => event.key === "Escape" && hideTip());
  document.addEventListener("scroll", hideTip, { passive: true });
}

// on paper: light, and as wide as paper is
function printing() {
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    isPrinting = true;
    for (const entry of charts) entry.place.style.width = "680px";
    redraw();
  });
  addEventListener("afterprint", () => {
    if (before === undefined) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = before;
    isPrinting = false;
    for (const entry of charts) entry.place.style.width = "";
    redraw();
  });
}

main().catch(error => {
  document.documentElement.dataset.ready = "failed";
  $("details").replaceChildren(element("p", {}, `This page cannot be drawn: ${error.message}`));
  throw error;
});
