import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { stageOf } from "./stages";
import type { History } from "./types";

const HEIGHT = 150;
const COLOURS = ["#4c8dff", "#e0584f"]; // of series that have none of their own

type Series = [string, (number | null)[], string?]; // its name, its values, its colour

/** Requests, errors and latency of the last hour. */
export function Charts({ history }: { history: History }) {
  const drawn = useMemo(() => seriesOf(history), [history]);
  if (!drawn) return <p class="dim">No request was answered in the last hour. The playground sends one.</p>;
  return (
    <div class="charts">
      {drawn.charts.map(([title, series]) => <Chart key={title} title={title} series={series} times={drawn.times} />)}
    </div>
  );
}

/** Requests that failed in the last hour, by their codes, the most frequent first. */
export function errorsOf(history: History): [string, number][] {
  const errors: Record<string, number> = {};
  for (const step of history.steps) for (const [code, count] of Object.entries(step.errors)) errors[code] = (errors[code] ?? 0) + count;
  return Object.entries(errors).sort((first, second) => second[1] - first[1]);
}

function seriesOf(history: History): { times: number[]; charts: [string, Series[]][] } | undefined {
  const first = history.steps[0]?.at;
  if (first === undefined) return undefined;
  // nothing was answered in the steps that are left out
  const stepOfTime = new Map(history.steps.map((step) => [step.at, step]));
  const last = Math.floor(history.now / history.step_s) * history.step_s;
  const steps = Array.from({ length: 1 + Math.max(0, (last - first) / history.step_s) }, (_, number) => {
    const at = first + number * history.step_s;
    return stepOfTime.get(at) ?? { at, requests: 0, errors: {}, p50_ms: undefined, p99_ms: undefined };
  });
  const rates = steps.map((step) => step.requests / history.step_s);
  const failed = steps.map((step) => Object.values(step.errors).reduce((sum, count) => sum + count, 0) / history.step_s);
  const total = history.stages.indexOf("total_time");
  const at = (name: "p50_ms" | "p99_ms", stage: number) => steps.map((step) => step[name]?.[stage] ?? null);
  const stages = history.stages.flatMap((name, place): Series[] => {
    const [word, colour] = stageOf(name);
    return place === total ? [] : [[word, at("p99_ms", place), colour]];
  });
  return {
    times: steps.map((step) => step.at),
    charts: [
      ["Requests a second", [["requests", rates], ["errors", failed]]],
      ["Latency, ms", [["median", at("p50_ms", total)], ["99th percentile", at("p99_ms", total)]]],
      ["Stages, 99th percentile, ms", stages],
    ],
  };
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now: what is drawn on a canvas does not follow it by itself. */
function useDark(): boolean {
  const [isDark, setDark] = useState(DARK.matches);
  useEffect(() => {
    const changed = () => setDark(DARK.matches);
    DARK.addEventListener("change", changed);
    return () => DARK.removeEventListener("change", changed);
  }, []);
  return isDark;
}

function Chart({ title, series, times }: { title: string; series: Series[]; times: number[] }) {
  const place = useRef<HTMLDivElement>(null);
  const drawn = useRef<uPlot | null>(null);
  const isDark = useDark();
  const data = [times, ...series.map(([, values]) => values)] as uPlot.AlignedData;
  useEffect(() => {
    if (!place.current) return;
    const colour = getComputedStyle(place.current).color;
    const axis = { stroke: colour, grid: { width: 0.2, stroke: colour } };
    const plot = new uPlot(
      {
        width: place.current.clientWidth || 300,
        height: HEIGHT,
        legend: { live: false },
        axes: [{ ...axis, space: 80 }, { ...axis, size: 62 }],
        series: [
          {},
          ...series.map(([label, , colour], number) => ({
            label,
            stroke: colour ?? COLOURS[number % COLOURS.length],
            width: 1.5,
            spanGaps: false,
            points: { show: true, size: 4 },
          })),
        ],
      },
      data,
      place.current,
    );
    drawn.current = plot;
    const sized = new ResizeObserver(([entry]) => entry && plot.setSize({ width: entry.contentRect.width, height: HEIGHT }));
    sized.observe(place.current);
    return () => {
      sized.disconnect();
      plot.destroy();
    };
  }, [title, isDark]);
  useEffect(() => drawn.current?.setData(data), [times, series]);
  return (
    <figure class="panel">
      <figcaption>{title}</figcaption>
      <div ref={place} role="img" aria-label={`${title}: ${series.map(([name, values]) => `${name} ${(values[values.length - 1] ?? 0).toFixed(1)} now`).join(", ")}`} />
    </figure>
  );
}
