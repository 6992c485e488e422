"use strict";
(() => {
  const STEP = 24;
  const SVG = "http://www.w3.org/2000/svg";

  const make = (tag, className, ...content) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...content.filter((part) => part !== null && part !== undefined));
    return node;
  };

  const shown = (value) => {
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", "\u2212");
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) {
      return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e").replaceAll("-", "\u2212");
    }
    return value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(size)))).replace("-", "\u2212");
  };

  // A cross-hair on every chart: pointer, touch, or arrow keys.
  const watchChart = (svg) => {
    const chart = JSON.parse(svg.dataset.chart);
    const legend = svg.parentElement.querySelector(".legend");
    const labels = legend ? [...legend.querySelectorAll("b")] : [];
    const at = svg.parentElement.querySelector(".at");
    const rest = { at: at ? at.textContent : "", texts: labels.map((label) => label.textContent) };
    const [low, high, left, right] = chart.x;
    const steps = [...new Set(chart.series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
    let cross = null;
    let index = -1;
    const nearest = (points, x) => {
      let first = 0;
      let last = points.length - 1;
      while (last - first > 1) {
        const middle = (first + last) >> 1;
        if (points[middle][0] <= x) first = middle; else last = middle;
      }
      return Math.abs(points[last][0] - x) < Math.abs(points[first][0] - x) ? points[last] : points[first];
    };
    const show = (x) => {
      const place = left + ((x - low) / (high - low)) * (right - left);
      if (!cross) {
        cross = document.createElementNS(SVG, "line");
        cross.setAttribute("class", "cross");
        svg.append(cross);
      }
      cross.setAttribute("x1", place);
      cross.setAttribute("x2", place);
      cross.setAttribute("y1", chart.y[3]);
      cross.setAttribute("y2", chart.y[2]);
      chart.series.forEach((one, number) => {
        const point = nearest(one.points, x);
        labels[number].textContent = shown(point[1]) + (point[0] === x ? "" : ` (${shown(point[0])})`);
      });
      if (at) at.textContent = `${chart.xName} ${shown(x)}`;
    };
    const hide = () => {
      if (cross) cross.remove();
      cross = null;
      index = -1;
      labels.forEach((label, number) => { label.textContent = rest.texts[number]; });
      if (at) at.textContent = rest.at;
    };
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const x = low + ((place - left) / (right - left)) * (high - low);
      const [closest] = nearest(steps.map((step) => [step]), x);
      index = steps.indexOf(closest);
      show(closest);
    };
    if (!labels.length || labels.length !== chart.series.length) return;
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const to = {
        ArrowLeft: index < 0 ? steps.length - 1 : Math.max(index - 1, 0),
        ArrowRight: Math.min(index + 1, steps.length - 1),
        Home: 0,
        End: steps.length - 1,
      }[event.key];
      if (event.key === "Escape") hide();
      if (to === undefined) return;
      event.preventDefault();
      index = to;
      show(steps[index]);
    });
  };

  const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];

  // The caption, with the words marked that the first system did not say.
  const caption = (text, before) => {
    if (text === null) return make("span", "empty", "no caption");
    if (!text.trim()) return make("span", "empty", "(empty)");
    if (before === null) return make("span", "", text);
    const known = new Set(words(before));
    const parts = text.split(/([\p{L}\p{N}]+)/u);
    return make("span", "", ...parts.map((part, place) => (
      place % 2 && !known.has(part.toLowerCase()) ? make("mark", "", part) : part
    )));
  };

  const startGallery = (data) => {
    const form = document.getElementById("gallery-controls");
    const place = document.getElementById("gallery");
    const count = document.getElementById("gallery-count");
    const more = document.getElementById("gallery-more");
    const { text, order, metric, from, to } = form.elements;
    const fill = (select, names) => names.forEach((name, value) => select.append(new Option(name, value)));
    fill(metric, data.metrics);
    fill(from, data.systems);
    fill(to, data.systems);
    to.value = data.systems.length - 1;
    for (const label of form.querySelectorAll("[data-when]")) {
      const needed = label.dataset.when === "systems" ? data.systems.length > 2 : data.metrics.length > 0;
      label.hidden = !needed;
      if (!needed) label.style.display = "none";
    }
    if (!data.metrics.length || data.systems.length < 2) order.value = "data";
    for (const item of data.items) {
      item.text = [item.id, ...item.references, ...item.captions].filter(Boolean).join(" ").toLowerCase();
    }
    let found = [];
    let drawn = 0;

    const change = (item) => {
      const scores = item.scores[metric.value];
      if (!scores || scores[from.value] === null || scores[to.value] === null) return null;
      return scores[to.value] - scores[from.value];
    };

    const scoreLine = (item, number) => {
      const first = Number(from.value);
      const parts = data.metrics.map((name, which) => {
        const score = item.scores[which][number];
        if (score === null) return null;
        const part = make("span", "", `${name} `, make("b", "", score.toFixed(3).replace("-", "\u2212")));
        const base = item.scores[which][first];
        if (number !== first && base !== null) {
          const gain = score - base;
          const sign = gain > 0.0005 ? "up" : gain < -0.0005 ? "down" : "";
          if (sign) part.append(make("span", sign, ` ${sign === "up" ? "\u25b2" : "\u25bc"}\u202f${Math.abs(gain).toFixed(3)}`));
        }
        return part;
      });
      return make("div", "scores", ...parts);
    };

    const said = (item, numbers) => {
      const first = Number(from.value);
      return make("dl", "said", ...numbers.map((number) => {
        const before = number === first ? null : item.captions[first];
        const text = make("dd", "", caption(item.captions[number], before), scoreLine(item, number));
        return make("div", "", make("dt", "", data.systems[number]), text);
      }));
    };

    const card = (item) => {
      const references = item.references.map((reference) => make("li", "", reference));
      const list = make("div", "", make("h4", "", item.id));
      if (references.length) {
        list.append(make("ul", "refs", ...references.slice(0, 2)));
        if (references.length > 2) {
          list.append(make("details", "", make("summary", "", `${references.length - 2} more references`),
            make("ul", "refs", ...references.slice(2))));
        }
      }
      let picture = null;
      if (item.image) {
        picture = make("img");
        picture.src = item.image;
        picture.alt = item.references[0] || `image ${item.id}`;
        picture.loading = "lazy";
      }
      const every = data.systems.map((_, number) => number);
      const chosen = [Number(from.value), Number(to.value)];
      const shownFirst = every.length > 4 ? [...new Set(chosen)] : every;
      const others = every.filter((number) => !shownFirst.includes(number));
      let rest = null;
      if (others.length) rest = make("details", "", make("summary", "", `${others.length} more systems`), said(item, others));
      return make("article", "", make("div", picture ? "top" : "", picture, list), said(item, shownFirst), rest);
    };

    const draw = () => {
      const next = found.slice(drawn, drawn + STEP);
      place.append(...next.map(card));
      drawn += next.length;
      more.hidden = drawn >= found.length;
      const all = data.items.length;
      const which = found.length === all ? `${all}` : `${found.length} of ${all}`;
      count.textContent = `${drawn} shown of ${which} images`;
    };

    const update = () => {
      const wanted = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      found = data.items.filter((item) => wanted.every((word) => item.text.includes(word)));
      const by = { change: (value) => -Math.abs(value), rise: (value) => -value, fall: (value) => value }[order.value];
      if (by) {
        const keys = new Map(found.map((item) => {
          const value = change(item);
          return [item, value === null ? Infinity : by(value)];
        }));
        found.sort((a, b) => (keys.get(a) === keys.get(b) ? 0 : keys.get(a) - keys.get(b)));
      }
      place.replaceChildren();
      drawn = 0;
      draw();
    };

    form.addEventListener("input", update);
    form.addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", () => {
      const first = drawn;
      draw();
      const card = place.children[first];
      if (card) {
        card.tabIndex = -1;
        card.focus({ preventScroll: true });
      }
    });
    update();
  };

  document.querySelectorAll("svg.chart").forEach(watchChart);
  const block = document.getElementById("gallery-data");
  if (block) startGallery(JSON.parse(block.textContent));
  document.documentElement.dataset.ready = "true";
})();
