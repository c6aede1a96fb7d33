import { ModelHistory } from "./model-history";
import { ModelResidency } from "./model-residency";
import { baseId, outputsText, stateText } from "./model-properties";
import { href } from "./routes";
import { Table } from "./table";
import type { Model } from "./types";
import { formatBytes, formatDuration, formatValue } from "./format";

/** The page of a model: its state, its properties, its workers and its history. */
export function ModelDetail({ model }: { model: Model }) {
  const { alias, hosts, downloads } = model;
  const rows: [string, string][] = [
    ["takes", model.inputs.join(", ")],
    ["gives", outputsText(model)],
    ["most tokens of an input", `${model.max_sequence_length}`],
    ["revision", model.revision],
    ["fingerprint", model.fingerprint ?? ""],
    ["licence", model.license],
    ["bundles", model.bundles.join(", ")],
    ["precision", [...model.precision.served, model.precision.reason].filter(Boolean).join(", ")],
    ["engine", [model.backend, model.engine.reason].filter(Boolean).join(", ")],
    ["score scale", model.score_scale ?? ""],
    ["shorter dense vectors", (model.matryoshka_dims ?? []).join(", ")],
    ["LoRA adapters", model.supports_lora ? "yes" : ""],
  ];
  return (
    <article class="detail">
      <h2>{model.id}</h2>
      {model.description && <p>{model.description}</p>}
      <p class="row">
        <span class={`state ${model.state}`}>{stateText(model)}</span>
        {model.tasks.map((task) => <a class="try" href={href("playground", [task, model.id])}>{`Try ${task} in the playground`}</a>)}
        {model.variant_of && <a href={href("models", [baseId(model)])}>{`Profile of ${baseId(model)}`}</a>}
      </p>
      {model.last_error && <p class="bad">{`It could not be loaded: ${model.last_error.message}. ${retryText(model)}`}</p>}
      {alias && <Alias alias={alias} />}
      <dl class="facts">
        {rows.filter(([, value]) => value).map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}
      </dl>
      {downloads.map((download) => <Download key={download.worker} download={download} />)}
      <h3>On workers</h3>
      {hosts.length ? <Hosts model={model.id} hosts={hosts} /> : <p class="dim">No worker has loaded this model. The first request loads it.</p>}
      <ModelResidency model={model} />
      <Certificate model={model} />
      <Profiles model={baseId(model)} profiles={model.profiles} />
      <Prompts texts={model.prompt_texts} />
      {!model.variant_of && <ModelHistory model={model.id} />}
    </article>
  );
}

/** Say how a model whose load failed is loaded again. */
const retryText = ({ id, last_error }: Model): string =>
  last_error?.permanent ? `Requests are refused until a load by hand succeeds: once the fault is mended, press Load below (scope admin), or run sie models load ${id}.` : "The next request tries again, and so does Load.";

function Hosts({ model, hosts }: { model: string; hosts: Model["hosts"] }) {
  return (
    <>
      <Table label={`Workers of ${model}`} class="hosts" columns={["worker", "state", { number: "memory" }, { number: "load time" }, { number: "in flight" }]}>
        {hosts.map((host) => (
          <tr key={host.worker}>
            <td>{host.worker}</td>
            <td><span class={`state ${host.state}`}>{host.state}</span></td>
            <td class="number">{host.memory_bytes ? formatBytes(host.memory_bytes) : ""}</td>
            <td class="number">{host.load_s ? formatDuration(host.load_s) : ""}</td>
            <td class="number">{host.queued}</td>
          </tr>
        ))}
      </Table>
      {hosts.map(({ worker, error }) => error && <p key={worker} class="dim">{`Load on ${worker} failed, ${errorText(error)}`}</p>)}
    </>
  );
}

const errorText = ({ code, attempts, permanent }: NonNullable<Model["hosts"][number]["error"]>): string =>
  `${code}: ${attempts} ${attempts === 1 ? "attempt" : "attempts"}${permanent ? ", no further one by itself" : ""}`;

function Download({ download: { worker, done_bytes, total_bytes, bytes_per_s } }: { download: Model["downloads"][number] }) {
  const isSized = total_bytes > 0;
  const figures = [
    isSized ? `${Math.floor((100 * done_bytes) / total_bytes)} %, ${formatBytes(done_bytes)} of ${formatBytes(total_bytes)}` : formatBytes(done_bytes),
    bytes_per_s > 0 ? `${formatBytes(bytes_per_s)}/s` : "",
    isSized && bytes_per_s > 0 ? `${formatDuration((total_bytes - done_bytes) / bytes_per_s)} left` : "",
  ];
  return (
    <p class="download">
      {`${worker} downloads `}
      <progress max={isSized ? total_bytes : undefined} value={isSized ? done_bytes : undefined} aria-label={`Download at ${worker}`} />
      {` ${figures.filter(Boolean).join(", ")}`}
    </p>
  );
}

const cosineText = (value: number): string => `worst cosine ${value.toFixed(7)}`;

/** The checks of a load. A loaded model has passed all checks that ran, so a failed check belongs to a worker that has not
 * loaded the model. */
function Certificate({ model: { certificate, hosts } }: { model: Model }) {
  const failed = hosts.filter((host) => host.error?.code === "CERTIFICATE");
  if (!certificate && !failed.length) return null;
  return (
    <>
      <h3>Certificate</h3>
      <ul class="checks">
        {failed.map(({ worker, error }) => <Check state="failed" name={`On ${worker}`} figure={error?.message ?? ""} />)}
        {certificate && (
          <>
            {certificate.digests.length
              ? certificate.digests.map((file) => <Check state="passed" name={`SHA-256 of ${file}`} figure="that of the entry" />)
              : <Check state="not checked" name="SHA-256 of the files" figure="the entry has none" />}
            {Object.entries(certificate.packed).map(([output, value]) => (
              <Check state="passed" name={`Packed computation of ${output} against the padded one`} figure={cosineText(value)} />
            ))}
            {certificate.golden === null
              ? <Check state="not checked" name="Vectors of the public reference" figure="the entry has none" />
              : <Check state="passed" name="Vectors of the public reference" figure={cosineText(certificate.golden)} />}
          </>
        )}
      </ul>
      {certificate && <p class="dim">{`Checked in ${formatDuration(certificate.seconds)}, as it was loaded.`}</p>}
    </>
  );
}

const MARKS = { passed: ["good", "✓"], failed: ["bad", "✗"], "not checked": ["dim", "–"] } as const;

function Check({ state, name, figure }: { state: keyof typeof MARKS; name: string; figure: string }) {
  const [colour, mark] = MARKS[state];
  return <li><span class={colour}>{`${mark} ${state}`}</span><span>{name}</span><span class="dim">{figure}</span></li>;
}

const settingText = (value: unknown): string => (value === null ? "none" : formatValue(value));

function Profiles({ model, profiles }: { model: string; profiles: Model["profiles"] }) {
  const others = Object.entries(profiles).filter(([, profile]) => !profile.is_default);
  if (!others.length) return null;
  return (
    <>
      <h3>Profiles, and what they change</h3>
      <dl class="pairs-of">
        {others.map(([name, { changes }]) => (
          <div key={name}>
            <dt><a href={href("models", [`${model}:${name}`])}>{name}</a></dt>
            <dd>{Object.entries(changes).map(([setting, value]) => `${setting} ${settingText(value)}`).join(", ") || "nothing"}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

function Prompts({ texts }: { texts: Model["prompt_texts"] }) {
  const names = Object.keys(texts).sort();
  if (!names.length) return null;
  return (
    <>
      <h3>Prompts</h3>
      <dl class="pairs-of">{names.map((name) => <div key={name}><dt>{name}</dt><dd><code>{texts[name]}</code></dd></div>)}</dl>
    </>
  );
}

function Alias({ alias: { targets, shadow } }: { alias: NonNullable<Model["alias"]> }) {
  const totalWeight = targets.reduce((sum, target) => sum + target.weight, 0);
  const main = targets.reduce((best, target) => (target.weight > best.weight ? target : best));
  return (
    <>
      <h3>An alias of</h3>
      <Table label="Targets of the alias" class="targets" columns={["model", { number: "weight" }, { number: "share of keys" }]}>
        {targets.map(({ model, weight }) => (
          <tr key={model}><td class="wrap">{model}</td><td class="number">{weight}</td><td class="number">{`${((100 * weight) / totalWeight).toFixed(1)} %`}</td></tr>
        ))}
      </Table>
      {shadow && <Shadow shadow={shadow} />}
      {targets.length > 1 && <p class="dim">{`The rest of this page is about ${main.model}, which serves most keys.`}</p>}
    </>
  );
}

function Shadow({ shadow: { model, share, figures } }: { shadow: NonNullable<NonNullable<Model["alias"]>["shadow"]> }) {
  const { copies, cosine, rank, served_ms, shadow_ms } = figures;
  const rows: [string, string][] = [
    ["model", model],
    ["share of requests that are copied", `${+(100 * share).toFixed(3)} %`],
    ["copies", Object.entries(copies).map(([result, count]) => `${count} ${result}`).join(", ") || "none yet"],
    ["mean cosine with what was served", cosine === null ? "" : cosine.toFixed(5)],
    ["mean rank correlation", rank === null ? "" : rank.toFixed(4)],
    ["mean time, served and shadow", served_ms === null || shadow_ms === null ? "" : `${served_ms.toFixed(1)} ms, ${shadow_ms.toFixed(1)} ms`],
  ];
  return (
    <>
      <h3>Its shadow, as this gateway measured it since the gateway started</h3>
      <dl class="facts shadow">{rows.filter(([, value]) => value).map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
    </>
  );
}
