"use strict";
/* Makes nodes of what View and Charts say. Text goes in as text, never as HTML. */

const Draw = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const CHART_HEIGHT = 110;
  const MARGIN = { left: 46, right: 8, top: 6, bottom: 18 };
  const CLOCK = [
    [0, "10 min ago", "start"],
    [0.5, "5 min ago", "middle"],
    [1, "now", "end"],
  ];

  function node(tag, text, attributes = {}, children = []) {
    const made = document.createElement(tag);
    if (text !== null && text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function shape(tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function facts(pairs) {
    return pairs.map(([name, text]) => node("div", null, {}, [node("dt", name), node("dd", text)]));
  }

  function marked(what) {
    return node("span", `${what.mark} ${what.text}`.trim(), { "data-level": what.level });
  }

  function bar(share, promised) {
    const box = node("span", null, { class: "bar", "aria-hidden": "true" });
    const put = (width, name) => {
      const fill = node("i", null, name ? { class: name } : {});
      fill.style.width = `${100 * Math.min(1, Math.max(0, width))}%`;
      box.append(fill);
    };
    if (promised !== undefined) put(promised, "promised");
    put(share);
    return box;
  }

  function spark(values, top, label, limit) {
    const svg = shape("svg", { class: "spark", viewBox: "0 -1 90 26", role: "img", "aria-label": label });
    if (limit !== undefined && top > 0) {
      const y = 24 - (24 * limit) / top;
      svg.append(shape("line", { x1: 0, x2: 90, y1: y, y2: y }));
    }
    svg.append(shape("polyline", { points: View.spark(values, top, 90, 24) }));
    return svg;
  }

  /** A chart's figure, made once: its title, the values beside their marks, and its place. */
  function figure(chart) {
    const marks = chart.lines.map((line, k) => node("span", null, { class: `mark mark${k}` }, [node("b", line.name), " ", node("output", "–", { "aria-live": "off" })]));
    const caption = node("figcaption", null, {}, [node("h3", chart.title), node("p", null, {}, marks)]);
    return node("figure", null, { class: "chart" }, [caption, node("div", null, { class: "plot" })]);
  }

  /** Fills a figure; `at` is the point that is looked at, null for the newest. */
  function chart(into, data, at) {
    const index = at === null ? data.num_points - 1 : Math.min(at, data.num_points - 1);
    into.querySelectorAll("output").forEach((out, k) => {
      out.textContent = data.lines[k].texts[index] ?? "–";
    });
    const place = into.querySelector(".plot");
    if (data.none) {
      place.replaceChildren(node("p", data.none, { class: "hint" }));
      return;
    }
    const width = Math.max(120, place.clientWidth);
    const inner = { width: width - MARGIN.left - MARGIN.right, height: CHART_HEIGHT - MARGIN.top - MARGIN.bottom };
    const label = `${data.title} of the last ten minutes. ${data.lines.map((l) => l.label).join("; ")}`;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${CHART_HEIGHT}`, width, height: CHART_HEIGHT, role: "img", "aria-label": label });
    const box = shape("g", { transform: `translate(${MARGIN.left} ${MARGIN.top})` });
    for (const tick of data.ticks) {
      const y = inner.height * (1 - tick.value / data.top);
      box.append(shape("line", { class: "grid", x1: 0, x2: inner.width, y1: y, y2: y }));
      box.append(shape("text", { x: -6, y: y + 4, "text-anchor": "end" }, tick.text));
    }
    for (const [share, text, anchor] of CLOCK) {
      box.append(shape("text", { x: share * inner.width, y: inner.height + 15, "text-anchor": anchor }, text));
    }
    data.lines.forEach((line, k) => {
      for (const points of Charts.stretches(line.values, data.top, inner.width, inner.height)) {
        if (points.length === 1) box.append(shape("circle", { class: `dot line${k}`, cx: points[0][0], cy: points[0][1], r: 2 }));
        else box.append(shape("polyline", { class: `line${k}`, points: points.map((p) => p.join(",")).join(" ") }));
      }
    });
    if (at !== null) {
      const x = (inner.width * index) / Math.max(1, data.num_points - 1);
      box.append(shape("line", { class: "at", x1: x, x2: x, y1: 0, y2: inner.height }));
    }
    svg.append(box);
    place.replaceChildren(svg);
  }

  /** The point of a chart below a pointer, of `num` in all. */
  function pointed(place, clientX, num) {
    const box = place.getBoundingClientRect();
    const share = (clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    return Math.round(Math.min(1, Math.max(0, share)) * (num - 1));
  }

  return { node, facts, marked, bar, spark, figure, chart, pointed };
})();
