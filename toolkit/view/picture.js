// A Vega-Lite picture whose data are replaced in place. The chart library is asked of the kernel once a page.

function library(model) {
  if (!globalThis.toolkitVega) {
    globalThis.toolkitVega = new Promise((resolve, reject) => {
      const late = setTimeout(() => {
        globalThis.toolkitVega = undefined;
        reject(new Error("the kernel did not send the chart library"));
      }, 60000);
      const hear = async (message) => {
        if (message.type !== "library") return;
        model.off("msg:custom", hear);
        clearTimeout(late);
        const url = URL.createObjectURL(new Blob([message.text], { type: "text/javascript" }));
        resolve((await import(url)).embed);
        URL.revokeObjectURL(url);
      };
      model.on("msg:custom", hear);
      model.send({ type: "library" });
    });
  }
  return globalThis.toolkitVega;
}

// Put the rows where the specification names them.
function fill(part, data) {
  if (Array.isArray(part)) part.forEach((inner) => fill(inner, data));
  else if (part && typeof part === "object") {
    if (part.data?.name in data) part.data.values = structuredClone(data[part.data.name]);
    for (const [key, inner] of Object.entries(part)) if (key !== "data") fill(inner, data);
  }
  return part;
}

// Controls say their names to screen readers: the widgets only show them.
function name(root) {
  for (const box of root?.querySelectorAll(".jupyter-widgets") ?? []) {
    const labels = box.querySelectorAll(":scope > .widget-label, :scope > .widget-label-basic > span");
    const words = [...labels].map((label) => label.textContent.replace("\u200b", "").trim()).find((text) => text);
    if (!words) continue;
    for (const part of box.querySelectorAll("input, select, textarea, .noUi-handle")) part.setAttribute("aria-label", words);
  }
}

function render({ model, el }) {
  let view, shown, busy = false, again = false;
  el.classList.add("toolkit-picture");
  const place = el.appendChild(document.createElement("div"));

  const paint = async () => {
    const embed = await library(model);
    const [spec, data, drawn] = ["spec", "data", "drawn"].map((trait) => model.get(trait));
    if (!spec.$schema) return;
    const text = JSON.stringify(spec);
    if (text === shown) {
      for (const [key, rows] of Object.entries(data)) view.data(key, structuredClone(rows));
      await view.runAsync();
    } else {
      view?.finalize();
      const whole = fill({ ...structuredClone(spec), autosize: { type: "pad", resize: true } }, data);
      view = (await embed(place, whole, { renderer: "svg", actions: false })).view;
      shown = text;
    }
    // Vega gives its container the first picture's description, and keeps it when only the data change.
    view.description(model.get("alt"));
    const svg = place.querySelector("svg");
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", model.get("alt"));
    svg.style.maxWidth = "100%";
    svg.style.height = "auto";
    const selector = model.get("selector");
    for (const mark of selector ? place.querySelectorAll(selector) : []) {
      mark.setAttribute("tabindex", "0");
      mark.style.cursor = "pointer";
    }
    name(el.closest(".toolkit-explorer"));
    el.dataset.drawn = drawn;
  };
  const draw = async () => {
    again = true;
    if (busy) return;
    busy = true;
    while (again) {
      again = false;
      try {
        await paint();
      } catch (error) {
        place.textContent = `JavaScript Error: ${error.message}`;
        shown = undefined;
      }
    }
    busy = false;
  };
  const click = (event) => {
    const selector = model.get("selector");
    const label = selector && event.target.closest?.(selector)?.getAttribute("aria-label");
    if (!label) return;
    model.set("clicked", { label, count: (model.get("clicked").count || 0) + 1 });
    model.save_changes();
  };
  const key = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    click(event);
  };
  el.addEventListener("click", click);
  el.addEventListener("keydown", key);
  model.on("change:drawn", draw);
  draw();
  setTimeout(() => name(el.closest(".toolkit-explorer")), 500);
  return () => {
    model.off("change:drawn", draw);
    view?.finalize();
  };
}

export default { render };
