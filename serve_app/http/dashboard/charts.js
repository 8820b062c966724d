"use strict";
/* The last ten minutes as charts: values, scales and words. Pure, as view.js is; draw.js puts them
   on the screen. */

const Charts = (() => {
  const CHARTS = [
    { title: "Tokens/s", form: "count", none: "", lines: [{ key: "tokens_per_s", name: "tokens/s" }] },
    {
      title: "Under way",
      form: "whole",
      none: "",
      lines: [
        { key: "decoding", name: "decoding" },
        { key: "open_requests", name: "open requests" },
      ],
    },
    {
      title: "Time to first token",
      form: "seconds",
      none: "No first token in the last ten minutes.",
      lines: [
        { key: "ttft_p50_s", name: "P50" },
        { key: "ttft_p99_s", name: "P99" },
      ],
    },
    {
      title: "Time a token",
      form: "seconds",
      none: "No second token in the last ten minutes.",
      lines: [
        { key: "token_p50_s", name: "P50" },
        { key: "token_p99_s", name: "P99" },
      ],
    },
  ];

  /** A number that reads well at an axis, at or above `value`. */
  function roundUp(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return power * ([1, 1.5, 2, 3, 4, 5, 6, 8].find((step) => step * power >= value * 0.9999) ?? 10);
  }

  /**
   * The charts of the last ten minutes: null where there is no history or nothing happened in it.
   * A value of null is a gap.
   */
  function all(view) {
    const history = view.load_history;
    if (!history || !CHARTS.some((c) => c.lines.some((l) => (history[l.key] ?? []).some((v) => v > 0)))) return null;
    return CHARTS.map((chart) => {
      const lines = chart.lines.map((line) => ({ name: line.name, values: history[line.key] ?? [] }));
      const most = Math.max(0, ...lines.flatMap((l) => l.values.filter((v) => v !== null)));
      const top = most > 0 ? roundUp(most) : 1;
      const text = chart.form === "seconds" ? View.seconds : View.count;
      return {
        title: chart.title,
        none: lines.every((l) => l.values.every((v) => v === null)) ? chart.none : "",
        top,
        ticks: [0, top / 2, top]
          .filter((value) => chart.form !== "whole" || Number.isInteger(value))
          .map((value) => ({ value, text: value ? text(value) : "0" })),
        lines: lines.map((l) => ({
          ...l,
          texts: l.values.map((v) => (v === null ? "–" : text(v))),
          label: `${l.name}: ${l.values.length ? text(l.values[l.values.length - 1]) : "–"} now, ${text(Math.max(...l.values.filter((v) => v !== null)))} at most`,
        })),
        interval_s: history.interval_s,
        num_points: Math.max(...lines.map((l) => l.values.length)),
      };
    });
  }

  /** Stretches of neighbouring values, as lists of [x, y] in a box; a gap ends a stretch. */
  function stretches(values, top, width, height) {
    const found = [];
    let open = null;
    values.forEach((value, i) => {
      if (value === null) {
        open = null;
        return;
      }
      if (open === null) found.push((open = []));
      const x = values.length > 1 ? (i * width) / (values.length - 1) : width;
      open.push([Number(x.toFixed(1)), Number((height - Math.min(1, value / top) * height).toFixed(1))]);
    });
    return found;
  }

  /** How long ago a point of a chart was. */
  function pointAge(chart, index) {
    const ago_s = (chart.num_points - 1 - index) * chart.interval_s;
    if (!ago_s) return "now";
    const minutes = Math.floor(ago_s / 60);
    return `${minutes ? `${minutes} min ` : ""}${ago_s % 60 ? `${ago_s % 60} s ` : ""}ago`;
  }

  return { all, stretches, pointAge, roundUp };
})();
