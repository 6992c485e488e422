"use strict";
(() => {
  const shown = (value) => String(Number(value.toPrecision(4))).replace("-", "\u2212");

  // A cross-hair on every chart, by pointer, touch or arrow keys: the legend has the values of that step.
  const watchChart = (svg) => {
    const { x: [low, high, left, right], y, xName, series } = JSON.parse(svg.dataset.chart);
    const labels = [...svg.parentElement.querySelectorAll(".at, .legend b")];
    const texts = labels.map((label) => label.textContent);
    const steps = [...new Set(series.flatMap(([, points]) => points.map(([x]) => x)))].sort((a, b) => a - b);
    const cross = document.createElementNS(svg.namespaceURI, "path");
    cross.setAttribute("class", "cross");
    let index = -1;
    const nearest = (points, x) => points.reduce((best, one) => (Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best));
    const show = (to) => {
      index = Math.min(Math.max(to, 0), steps.length - 1);
      const x = steps[index];
      cross.setAttribute("d", `M${left + ((x - low) / (high - low)) * (right - left)} ${y[3]} V${y[2]}`);
      svg.append(cross);
      const found = series.map(([, points]) => nearest(points, x));
      labels[0].textContent = `${xName} ${x}`;
      found.forEach(([at, value], n) => { labels[n + 1].textContent = shown(value) + (at === x ? "" : ` (${at})`); });
    };
    const hide = () => {
      cross.remove();
      index = -1;
      labels.forEach((label, n) => { label.textContent = texts[n]; });
    };
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      show(nearest(steps.map((step, n) => [step, n]), low + ((at - left) / (right - left)) * (high - low))[1]);
    };
    for (const name of ["pointermove", "pointerdown"]) svg.addEventListener(name, point);
    for (const name of ["pointerleave", "blur"]) svg.addEventListener(name, hide);
    svg.addEventListener("keydown", (event) => {
      const end = steps.length - 1;
      const to = { ArrowLeft: index < 0 ? end : index - 1, ArrowRight: index + 1, Home: 0, End: end }[event.key];
      if (event.key === "Escape") hide();
      if (to === undefined) return;
      event.preventDefault();
      show(to);
    });
  };
  document.querySelectorAll("svg.chart").forEach(watchChart);

  // The gallery: its cards in the order of the data, all in the page; searched, sorted, and shown a few at a time.
  const gallery = document.getElementById("gallery");
  if (gallery) {
    const form = document.forms[0];
    const more = document.getElementById("more");
    const items = [...gallery.children].map((card) => {
      const text = [...card.querySelectorAll("h4, li, dd > span")].map((part) => part.textContent).join(" ");
      return { card, scores: JSON.parse(card.dataset.scores), text: text.toLowerCase() };
    });
    let limit;
    let found = [];
    const draw = (count) => {
      limit = count;
      gallery.replaceChildren(...found.slice(0, limit).map((item) => item.card));
      more.hidden = limit >= found.length;
      const which = found.length === items.length ? items.length : `${found.length} of ${items.length}`;
      document.getElementById("count").textContent = `${gallery.children.length} shown of ${which} images`;
    };
    const update = () => {
      const { text, order, metric, from, to } = form.elements;
      const rank = { change: (value) => -Math.abs(value), rise: (value) => -value, fall: (value) => value }[order.value];
      const key = ({ scores }) => {
        const [before, after] = [from, to].map((one) => scores[metric.value][one.value]);
        return before === null || after === null ? Number.MAX_VALUE : rank(after - before);
      };
      const wanted = text.value.toLowerCase().split(/\s+/);
      found = items.filter((item) => wanted.every((word) => item.text.includes(word)));
      if (rank) found.sort((a, b) => key(a) - key(b));
      draw(24);
    };
    form.addEventListener("input", update);
    form.addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", () => draw(limit + 24));
    update();
  }
  document.documentElement.dataset.ready = "true";
})();
