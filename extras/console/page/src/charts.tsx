import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { stageOf } from "./stages";
import type { History } from "./types";

const HEIGHT = 150;
const COLOURS = ["#4c8dff", "#e0584f"]; // of series without a colour

type Series = [string, (number | null)[], string?]; // name, values, colour

/** The charts of the last hour: requests, errors, latency and stages. */
export function Charts({ history }: { history: History }) {
  const content = useMemo(() => chartsOf(history), [history]);
  if (!content) return <p class="dim">No request was answered in the last hour. The playground sends one.</p>;
  return (
    <div class="charts">
      {content.charts.map(([title, series]) => <Chart key={title} title={title} series={series} times={content.times} />)}
    </div>
  );
}

/** Return the number of failed requests of the last hour for each code, the most frequent code first. */
export function errorsOf(history: History): [string, number][] {
  const errors: Record<string, number> = {};
  for (const step of history.steps) for (const [code, count] of Object.entries(step.errors)) errors[code] = (errors[code] ?? 0) + count;
  return Object.entries(errors).sort((first, second) => second[1] - first[1]);
}

/** Return the titles and series of the charts, undefined if no request was answered. */
function chartsOf(history: History): { times: number[]; charts: [string, Series[]][] } | undefined {
  const first = history.steps[0]?.at;
  if (first === undefined) return undefined;
  // The history leaves out steps without an answered request.
  const stepOfTime = new Map(history.steps.map((step) => [step.at, step]));
  const last = Math.floor(history.now / history.step_s) * history.step_s;
  const steps = Array.from({ length: 1 + Math.max(0, (last - first) / history.step_s) }, (_, index) => {
    const at = first + index * history.step_s;
    return stepOfTime.get(at) ?? { at, requests: 0, errors: {}, p50_ms: undefined, p99_ms: undefined };
  });
  const rates = steps.map((step) => step.requests / history.step_s);
  const failed = steps.map((step) => Object.values(step.errors).reduce((sum, count) => sum + count, 0) / history.step_s);
  const total = history.stages.indexOf("total_time");
  const percentile = (name: "p50_ms" | "p99_ms", stage: number) => steps.map((step) => step[name]?.[stage] ?? null);
  const stages = history.stages.flatMap((name, index): Series[] => {
    const [label, colour] = stageOf(name);
    return index === total ? [] : [[label, percentile("p99_ms", index), colour]];
  });
  return {
    times: steps.map((step) => step.at),
    charts: [
      ["Requests a second", [["requests", rates], ["errors", failed]]],
      ["Latency, ms", [["median", percentile("p50_ms", total)], ["99th percentile", percentile("p99_ms", total)]]],
      ["Stages, 99th percentile, ms", stages],
    ],
  };
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

/** True while the page is dark. A canvas does not follow the colour scheme by itself. */
function useDark(): boolean {
  const [isDark, setDark] = useState(DARK.matches);
  useEffect(() => {
    const update = () => setDark(DARK.matches);
    DARK.addEventListener("change", update);
    return () => DARK.removeEventListener("change", update);
  }, []);
  return isDark;
}

/** A chart of series over the last hour. */
function Chart({ title, series, times }: { title: string; series: Series[]; times: number[] }) {
  const container = useRef<HTMLDivElement>(null);
  const plotRef = useRef<uPlot | null>(null);
  const isDark = useDark();
  const data = [times, ...series.map(([, values]) => values)] as uPlot.AlignedData;
  useEffect(() => {
    if (!container.current) return;
    const colour = getComputedStyle(container.current).color;
    const axis = { stroke: colour, grid: { width: 0.2, stroke: colour } };
    const plot = new uPlot(
      {
        width: container.current.clientWidth || 300,
        height: HEIGHT,
        legend: { live: false },
        axes: [{ ...axis, space: 80 }, { ...axis, size: 62 }],
        series: [
          {},
          ...series.map(([label, , colour], index) => ({
            label,
            stroke: colour ?? COLOURS[index % COLOURS.length],
            width: 1.5,
            spanGaps: false,
            points: { show: true, size: 4 },
          })),
        ],
      },
      data,
      container.current,
    );
    plotRef.current = plot;
    const observer = new ResizeObserver(([entry]) => entry && plot.setSize({ width: entry.contentRect.width, height: HEIGHT }));
    observer.observe(container.current);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [title, isDark]);
  useEffect(() => plotRef.current?.setData(data), [times, series]);
  return (
    <figure class="panel">
      <figcaption>{title}</figcaption>
      <div ref={container} role="img" aria-label={`${title}: ${series.map(([name, values]) => `${name} ${(values[values.length - 1] ?? 0).toFixed(1)} now`).join(", ")}`} />
    </figure>
  );
}
