import { useState } from "preact/hooks";
import { ModelDetail } from "./model-detail";
import type { Model } from "./types";

const SHOWN = 200; // rows of a table; a filter finds the rest

export function Models({ models }: { models: Model[] }) {
  const [filter, setFilter] = useState("");
  const [open, setOpen] = useState("");
  const wanted = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = models.filter((model) => {
    const words = [model.id, model.description, model.license, model.state, ...model.tasks, ...model.inputs, ...model.outputs].join("\n").toLowerCase();
    return wanted.every((word) => words.includes(word));
  });
  return (
    <section>
      <label class="row">
        Filter
        <input id="model-filter" type="search" value={filter} placeholder="words of its name, description, task, output, state" onInput={(event) => setFilter(event.currentTarget.value)} />
      </label>
      <p class="dim">{`${found.length} of ${models.length} models${found.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}`}</p>
      {!found.length && wanted.length > 0 && <p>No model has all of these words. Most that read several languages are described as multilingual, not by the names of the languages.</p>}
      <div class="scroll" tabIndex={0} role="region" aria-label="Models">
        <table>
          <thead><tr><th>model</th><th>state</th><th>tasks</th><th>takes</th><th>gives</th><th class="number">tokens</th><th class="number">workers</th></tr></thead>
          <tbody id="catalogue">
            {found.slice(0, SHOWN).map((model) => (
              <>
                <tr>
                  <td class="name"><button type="button" class="link" aria-expanded={open === model.id} onClick={() => setOpen(open === model.id ? "" : model.id)}>{model.id}</button>{model.description && <p class="about">{model.description}</p>}</td>
                  <td><span class={`state ${model.state}`}>{stateOf(model)}</span></td>
                  <td>{model.tasks.join(", ")}</td>
                  <td>{model.inputs.join(", ")}</td>
                  <td>{model.outputs.map((name) => (model.dims[name] ? `${name} ${model.dims[name]}` : name)).join(", ")}</td>
                  <td class="number">{model.max_sequence_length}</td>
                  <td class="number">{model.worker_count}</td>
                </tr>
                {open === model.id && <tr class="opened"><td colSpan={7}><ModelDetail model={model} /></td></tr>}
              </>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** The state, and of a download how far it is. */
function stateOf({ state, downloads }: Model): string {
  const [done, total] = downloads.reduce(([done, total], each) => [done + each.done_bytes, total + each.total_bytes], [0, 0]);
  return total ? `${state} ${Math.floor((100 * done) / total)} %` : state;
}
