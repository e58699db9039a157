"use strict";
// The page is complete without this script, which adds read-outs, zooming and hiding of workers.
(() => {
  const read = (id) => {
    const held = document.getElementById(id);
    return held === null ? null : JSON.parse(held.textContent);
  };
  const make = (name, text, className) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const page = read("page-data");
  if (page === null) return;
  const whole = [0, page.length_s];
  let view = whole.slice();
  const hidden = page.runs.map(() => new Set());

  // Axes

  const nice = (least) => {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((n) => n * power).find((one) => one >= least * (1 - 1e-9));
  };
  const minutes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const timeStep = (least) => (least > 1 && minutes.find((one) => one >= least)) || nice(least);
  const timeLabel = (value, each) => {
    const short = (number) => String(Number(number.toPrecision(7)));
    if (value === 0 || each % 60) return `${short(value)} s`;
    return each % 3600 ? `${short(value / 60)} min` : `${short(value / 3600)} h`;
  };
  const multiples = (low, high, each) => {
    const found = [];
    for (let n = Math.ceil(low / each - 1e-9); n * each <= high * (1 + 1e-9); n += 1) found.push(n * each);
    return found;
  };
  const part = (atS) => (100 * (atS - view[0])) / (view[1] - view[0]);
  const label = (text, at) => {
    const made = make("span", text, at < 2 ? "begin" : at > 95 ? "end" : "");
    made.style.left = `${at}%`;
    return made;
  };
  const timeLabels = () => {
    const each = timeStep((view[1] - view[0]) / 6);
    return multiples(view[0], view[1], each).map((at) => label(timeLabel(at, each), part(at)));
  };
  const stepLabels = (run) => {
    const seen = run.left.map((_, n) => n).filter((n) => run.right[n] > view[0] && run.left[n] < view[1]);
    if (!seen.length) return [];
    const count = seen.reduce((sum, n) => sum + run.last[n] - run.first[n] + 1, 0);
    const each = Math.max(1, nice(count / 6));
    const made = [];
    let before = -99;
    for (const n of seen) {
      for (const step of multiples(run.first[n], run.last[n], each)) {
        const within = (step - run.first[n]) / (run.last[n] - run.first[n] + 1);
        const at = part(run.left[n] + within * (run.right[n] - run.left[n]));
        if (at < 0 || at > 97 || at - before < 7) continue;
        made.push(label(`${made.length ? "" : "step "}${step.toLocaleString("en")}`, at));
        before = at + (made.length === 1 ? 3 : 0);
      }
    }
    return made;
  };

  // Zooming: all drawings over time follow

  const drawings = [...document.querySelectorAll("svg.x")];
  const show = (low, high) => {
    const least = Math.min(whole[1], Math.max(page.least_s, 1e-6));
    const wide = Math.min(Math.max(high - low, least), whole[1]);
    const begin = Math.min(Math.max(low, 0), whole[1] - wide);
    view = [begin, begin + wide];
    const units = 1000 / whole[1];
    for (const one of drawings) {
      const box = one.viewBox.baseVal;
      one.setAttribute("viewBox", `${begin * units} 0 ${wide * units} ${box.height}`);
    }
    for (const labels of document.querySelectorAll(".xlabels[data-axis]")) {
      const run = page.runs[charts.get(labels.closest("figure"))?.run];
      labels.querySelector(".times").replaceChildren(...timeLabels());
      const steps = labels.querySelector(".steps");
      if (steps && run) steps.replaceChildren(...stepLabels(run));
    }
    point(null);
  };
  const zoom = (factor, atS) => {
    const middle = atS ?? (view[0] + view[1]) / 2;
    show(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
  };

  // Read-outs

  const charts = new Map();
  for (const figure of document.querySelectorAll("figure.chart")) {
    const found = /^run(\d+)-/.exec(figure.id);
    const rows = found && read(`${figure.id}-data`);
    if (rows) charts.set(figure, { run: Number(found[1]), rows, at: null });
  }
  const bucketAt = (run, atS) => {
    let low = 0;
    let high = run.right.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (run.right[middle] < atS) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const readOut = (chart, n) => {
    const run = page.runs[chart.run];
    const [first, last] = [run.first[n], run.last[n]].map((step) => step.toLocaleString("en"));
    const process = run.processes > 1 ? `process ${run.process[n]}, ` : "";
    const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    const rows = chart.rows
      .filter((row) => !hidden[chart.run].has(row.worker))
      .map((row) => {
        const known = row.parts.filter((one) => one[2][n] !== null);
        const values = known.map(([name, unit, all]) => `${name} ${all[n]} ${unit}`.trim());
        return values.length ? `${row.name}: ${values.join(", ")}` : "";
      })
      .filter(Boolean);
    return `${process}${steps}, up to ${run.right[n].toPrecision(5)} s: ${rows.join("; ")}`;
  };
  function point(figure, n) {
    for (const cursor of document.querySelectorAll(".cursor")) cursor.style.display = "none";
    const chart = charts.get(figure);
    if (!chart) return;
    const run = page.runs[chart.run];
    chart.at = Math.min(Math.max(n, 0), run.right.length - 1);
    const at = part((run.left[chart.at] + run.right[chart.at]) / 2);
    figure.querySelector(".readout").textContent = readOut(chart, chart.at);
    if (at < 0 || at > 100) return;
    for (const cursor of figure.querySelectorAll(".cursor")) {
      cursor.style.display = "block";
      cursor.style.left = `${at}%`;
    }
  }

  // Pointer and keys

  const secondsAt = (area, event) => {
    const box = area.getBoundingClientRect();
    const within = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    return view[0] + within * (view[1] - view[0]);
  };
  const select = (area, figure) => {
    let from = null;
    const mark = make("div", "", "selected");
    area.append(make("div", "", "cursor"));
    area.addEventListener("pointermove", (event) => {
      const atS = secondsAt(area, event);
      point(figure, bucketAt(page.runs[charts.get(figure).run], atS));
      if (from === null) return;
      mark.style.left = `${part(Math.min(from, atS))}%`;
      mark.style.width = `${part(Math.max(from, atS)) - part(Math.min(from, atS))}%`;
    });
    area.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0) return;
      from = secondsAt(area, event);
      mark.style.width = "0";
      area.append(mark);
      area.setPointerCapture(event.pointerId);
    });
    area.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [low, high] = [from, secondsAt(area, event)].sort((a, b) => a - b);
      from = null;
      mark.remove();
      if (part(high) - part(low) > 1) show(low, high);
    });
    area.addEventListener("pointercancel", () => {
      from = null;
      mark.remove();
    });
    area.addEventListener("dblclick", () => show(...whole));
  };
  const keyed = (figure, event) => {
    const chart = charts.get(figure);
    const run = page.runs[chart.run];
    const now = chart.at ?? bucketAt(run, (view[0] + view[1]) / 2);
    const leap = event.shiftKey ? 10 : 1;
    const atS = (run.left[now] + run.right[now]) / 2;
    const acts = {
      ArrowLeft: () => point(figure, now - leap),
      ArrowRight: () => point(figure, now + leap),
      Home: () => point(figure, bucketAt(run, view[0])),
      End: () => point(figure, bucketAt(run, view[1])),
      "+": () => zoom(0.5, atS),
      "=": () => zoom(0.5, atS),
      "-": () => zoom(2, atS),
      0: () => show(...whole),
      Escape: () => show(...whole),
    };
    if (event.target !== figure || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!Object.hasOwn(acts, event.key)) return;
    event.preventDefault();
    acts[event.key]();
  };
  for (const figure of charts.keys()) {
    figure.dataset.live = "";
    figure.tabIndex = 0;
    figure.setAttribute("aria-roledescription", "chart; arrow keys read values, plus and minus zoom");
    const readout = make("output", "Point at the chart or use the arrow keys to read values. Drag to zoom in.", "readout");
    figure.append(readout);
    for (const drawn of figure.querySelectorAll("svg.x")) select(drawn.parentElement, figure);
    figure.addEventListener("keydown", (event) => keyed(figure, event));
  }

  // Tools of each run

  const button = (text, title, act) => {
    const made = make("button", text);
    made.type = "button";
    made.title = title;
    made.setAttribute("aria-label", title);
    made.addEventListener("click", act);
    return made;
  };
  for (const place of document.querySelectorAll(".tools[data-run]")) {
    const number = Number(place.dataset.run);
    const workers = make("fieldset");
    workers.append(make("legend", "Workers shown:"));
    for (const [worker, name] of page.runs[number].workers) {
      const kept = make("label");
      const box = make("input");
      box.type = "checkbox";
      box.checked = true;
      box.addEventListener("change", () => {
        hidden[number][box.checked ? "delete" : "add"](worker);
        for (const one of document.querySelectorAll(`#run${number} [data-worker="${worker}"]`)) {
          one.classList.toggle("hidden", !box.checked);
        }
      });
      kept.append(box, ` ${name}`);
      workers.append(kept);
    }
    place.append(
      button("+", "zoom in", () => zoom(0.5)),
      button("−", "zoom out", () => zoom(2)),
      button("whole run", "show the whole run", () => show(...whole)),
      workers,
    );
  }
})();
