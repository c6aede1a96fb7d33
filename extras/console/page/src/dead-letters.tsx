import { useState } from "preact/hooks";
import { sendRequest, getJson } from "./api";
import { useAction } from "./action";
import { Confirm } from "./confirm";
import { MissingScope, useScope } from "./session";
import { Table } from "./table";
import type { DeadLetterPage, Purged, Replayed, ReplayedAll } from "./types";

const PATH = "/v1/dead-letters";

/** Work that was given up: the list, one dead letter, its replay and its removal. The inputs are not shown. */
export function DeadLetters() {
  const mayRead = useScope("admin");
  const [page, setPage] = useState<DeadLetterPage>();
  const [listFilter, setListFilter] = useState<Record<string, string>>({}); // the filter of the list on the page
  const [after, setAfter] = useState(""); // the next replay of a filter continues after this letter
  const [typedFilter, setTypedFilter] = useState<Record<string, string>>({ pool: "", code: "", reason: "", model: "", lane: "" });
  const [open, setOpen] = useState("");
  const [purging, setPurging] = useState(""); // an id, or "all"
  const { isBusy, notice, refusal, ...action } = useAction();
  const runAction = (work: () => Promise<string>, refresh?: () => Promise<void>) => {
    setPurging("");
    return action.runAction(work, refresh);
  };
  const query = (more: Record<string, string> = {}, filter = listFilter) => {
    const fields = Object.entries({ ...filter, ...more }).map(([name, value]) => [name, value.trim()] as [string, string]);
    return new URLSearchParams(fields.filter(([, value]) => value));
  };
  const isListed = `${query({}, typedFilter)}` === `${query()}`; // "all that fit" means the filter of the list
  const filterText = [...query()].filter(([name]) => name !== "pool").map(([name, value]) => `, ${name} ${value}`).join("");
  const letterPath = (id: string, rest = "") => `${PATH}/${encodeURIComponent(id)}${rest}?${new URLSearchParams({ pool: page?.pool ?? "" })}`;
  const read = async (more: Record<string, string> = {}, filter = listFilter) => setPage(await getJson<DeadLetterPage>(`${PATH}?${query(more, filter)}`));
  const showOlder = (before: number) => runAction(async () => (await read({ before: `${before}` }), ""));
  const show = () =>
    runAction(async () => {
      await read({}, typedFilter);
      setListFilter(typedFilter);
      setAfter("");
      return "";
    });
  const replay = (path: string) =>
    runAction(async () => {
      const outcome = await sendRequest<Replayed | ReplayedAll>({ method: "POST", path });
      const all = "replayed" in outcome ? outcome.replayed : [outcome];
      const next = "replayed" in outcome ? outcome.next : null;
      if ("replayed" in outcome) setAfter(`${next ?? ""}`);
      return (all.map((letter) => `${letter.id}: ${[letter.state, ...letter.errors.map((error) => `${error.count} ${error.code} ${error.reason}`)].join(", ")}`).join("; ") || "nothing to replay") + (next === null ? "" : "; more are left");
    }, read);
  const purge = () => {
    const needsAll = ![...query().keys()].some((name) => name !== "pool");
    const path = purging === "all" ? `${PATH}?${query(needsAll ? { all: "true" } : {})}` : letterPath(purging);
    return runAction(async () => {
      const result = await sendRequest<Purged>({ method: "DELETE", path });
      return `${result.removed} removed${result.complete ? "" : "; more are left"}`;
    }, read);
  };
  const field = (name: string, title: string) => (
    <label>
      {title}
      <input value={typedFilter[name]} spellcheck={false} autocomplete="off" onInput={(event) => setTypedFilter({ ...typedFilter, [name]: event.currentTarget.value })} />
    </label>
  );
  return (
    <>
      <MissingScope scope="admin" subject="Dead letters need" />
      {mayRead && (
        <form class="row" onSubmit={(event) => { event.preventDefault(); void show(); }}>
          {field("pool", "Pool")}{field("code", "Code")}{field("reason", "Reason")}{field("model", "Model")}{field("lane", "Lane")}
          <button type="submit" disabled={isBusy}>Show</button>
        </form>
      )}
      {purging && (
        <Confirm
          key={purging}
          id="purge"
          name="Confirm the purge"
          question={purging === "all" ? `Purge all dead letters of pool ${page?.pool ?? ""}${filterText}, with their inputs, for ever?` : `Purge dead letter ${purging}, with its inputs, for ever?`}
          yes="Purge"
          onYes={() => void purge()}
          onNo={() => setPurging("")}
        />
      )}
      <p role="status">{isBusy ? "working" : [notice, refusal].filter(Boolean).join("; ")}</p>
      {page && (
        <>
          <p class="dim">{`${page.total} in pool ${page.pool}; of the ${page.examined} looked at: ${page.counts.map((entry) => `${entry.count} ${entry.code} ${entry.reason}`).join(", ") || "none fits"}`}</p>
          {page.letters.length > 0 && (
            <>
              <p class="row">
                <button type="button" disabled={isBusy || !isListed} onClick={() => replay(`${PATH}/replay?${query(after ? { after } : {})}`)}>{after ? "Replay the next 20" : "Replay 20 that fit"}</button>
                <button type="button" disabled={isBusy || !isListed} onClick={() => setPurging("all")}>Purge all that fit</button>
                {!isListed && <span class="dim">Press Show first: the filter has changed</span>}
                {page.next !== null && <button type="button" disabled={isBusy} onClick={() => showOlder(page.next ?? 0)}>Older</button>}
              </p>
              <Table label="Dead letters" rows={{ id: "dead-letters" }} columns={["time", "id", "model", "lane", "error", { number: "inputs" }, { number: "deliveries" }, { number: "deaths" }, "actions"]}>
                {page.letters.map((letter) => (
                  <tr key={letter.id}>
                    <td>{new Date(letter.at * 1000).toLocaleString()}</td>
                    <td><button type="button" class="link" aria-expanded={open === letter.id} onClick={() => setOpen(open === letter.id ? "" : letter.id)}>{letter.id}</button></td>
                    <td class="name">{letter.model}</td><td class="name">{letter.lane}</td><td>{`${letter.code} ${letter.reason}`}</td>
                    <td class="number">{letter.inputs ?? "?"}</td><td class="number">{letter.deliveries}</td><td class="number">{letter.deaths}</td>
                    <td>
                      <button type="button" disabled={isBusy} aria-label={`Replay ${letter.id}`} onClick={() => replay(letterPath(letter.id, "/replay"))}>Replay</button>{" "}
                      <button type="button" disabled={isBusy} aria-label={`Purge ${letter.id}`} onClick={() => setPurging(letter.id)}>Purge</button>
                    </td>
                  </tr>
                ))}
              </Table>
              {page.letters.filter((letter) => letter.id === open).map((letter) => <pre class="code">{JSON.stringify(letter, null, 2)}</pre>)}
            </>
          )}
        </>
      )}
    </>
  );
}
