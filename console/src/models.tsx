import { useState } from "preact/hooks";
import { ModelHistory } from "./model-history";
import { ModelResidency } from "./model-residency";
import type { Model } from "./types";

const SHOWN = 200; // rows of a table; a filter finds the rest

export function Models({ models }: { models: Model[] }) {
  const [filter, setFilter] = useState("");
  const [open, setOpen] = useState("");
  const wanted = filter.trim().toLowerCase();
  const found = models.filter((model) => [model.id, ...model.tasks, ...model.outputs, model.state].some((each) => each.toLowerCase().includes(wanted)));
  return (
    <section>
      <label class="row">
        Filter
        <input id="model-filter" type="search" value={filter} placeholder="name, task, output or state" onInput={(event) => setFilter(event.currentTarget.value)} />
      </label>
      <p class="dim">{`${found.length} of ${models.length} models${found.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}`}</p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Models">
        <table>
          <thead><tr><th>model</th><th>state</th><th>tasks</th><th>takes</th><th>gives</th><th class="number">tokens</th><th class="number">workers</th></tr></thead>
          <tbody id="catalogue">
            {found.slice(0, SHOWN).map((model) => (
              <>
                <tr>
                  <td><button type="button" class="link" aria-expanded={open === model.id} onClick={() => setOpen(open === model.id ? "" : model.id)}>{model.id}</button></td>
                  <td><span class={`state ${model.state}`}>{model.state}</span></td>
                  <td>{model.tasks.join(", ")}</td>
                  <td>{model.inputs.join(", ")}</td>
                  <td>{model.outputs.map((name) => (model.dims[name] ? `${name} ${model.dims[name]}` : name)).join(", ")}</td>
                  <td class="number">{model.max_sequence_length ?? ""}</td>
                  <td class="number">{model.worker_count}</td>
                </tr>
                {open === model.id && <tr><td colSpan={7}><Detail model={model} /></td></tr>}
              </>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Detail({ model }: { model: Model }) {
  const rows: [string, string][] = [
    ["revision", model.revision ?? ""],
    ["fingerprint", model.fingerprint ?? ""],
    ["bundles", (model.bundles ?? []).join(", ")],
    ["workers", (model.workers ?? []).join(", ")],
    ["profiles", Object.keys(model.profiles ?? {}).join(", ")],
    ["licence", model.license ?? ""],
    ["precision", [...(model.precision?.served ?? []), model.precision?.reason ?? ""].filter(Boolean).join(", ")],
    ["engine", [model.backend ?? "", model.engine?.reason ?? ""].filter(Boolean).join(", ")],
    ["certificate", model.certificate ? JSON.stringify(model.certificate) : ""],
    ["prompts", (model.prompts ?? []).join(", ")],
    ["score scale", model.score_scale ?? ""],
    ["why it failed", model.last_error?.message ?? ""],
    ["alias of", (model.alias?.targets ?? []).map((each) => `${each.model} (${each.weight})`).join(", ")],
    ["shadow", model.alias?.shadow ? `${model.alias.shadow.model}, ${100 * model.alias.shadow.share} %` : ""],
  ];
  return (
    <>
      <dl class="facts">
        {rows.filter(([, value]) => value).map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}
      </dl>
      {model.downloads?.map((each) => (
        <p>{`${each.worker} downloads `}<progress max={each.total_bytes} value={each.done_bytes} aria-label={`Download at ${each.worker}`} /></p>
      ))}
      <ModelResidency model={model.id} />
      {!model.id.includes(":") && <ModelHistory model={model.id} />}
    </>
  );
}
