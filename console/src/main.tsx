import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { address, get, keep, key } from "./api";
import { Cluster } from "./cluster";
import { Jobs } from "./jobs";
import { pathOf } from "./model-words";
import { Models } from "./models";
import { Playground } from "./playground";
import { href, type Route, useRoute, VIEWS, type View } from "./routes";
import type { Model, Models as Listed, Whoami } from "./types";

const MODELS_EVERY_MS = 5_000;
const LOADING_EVERY_MS = 2_000; // while something is loaded or downloaded
const MODELS = 200; // that are read; a name finds others
const TYPED_MS = 250; // of rest, after which what was typed is asked for

const listed = (name: string): Promise<Listed> => get<Listed>(`/v1/models?limit=${MODELS}&filter=${encodeURIComponent(name)}`);

/** A model, undefined where there is none of this name. */
const one = (id: string): Promise<Model | undefined> =>
  get<Model>(pathOf(id)).catch((error: unknown) => {
    if (error instanceof SIEError && error.status === 404) return undefined;
    throw error;
  });

/** The first models, and those of `extras`: what was found by a name, and what the address names. */
async function known(search: string, named: string[], extras: Map<string, Model>): Promise<{ models: Model[]; total: number }> {
  const [all, found] = await Promise.all([listed(""), search ? listed(search) : undefined]);
  const total = all.total ?? 0;
  const far = total > MODELS ? named.filter((id) => !extras.has(id) && !all.models.some((model) => model.id === id)) : [];
  for (const model of [...(found?.models ?? []), ...(await Promise.all(far.map(one)))]) if (model) extras.set(model.id, model);
  return { models: [...new Map([...extras.values(), ...all.models].map((model) => [model.id, model])).values()], total };
}

function App() {
  const route = useRoute();
  const { view } = route;
  const [models, setModels] = useState<Model[]>();
  const [total, setTotal] = useState(0);
  const [wanted, setWanted] = useState("");
  const [scopes, setScopes] = useState<string[]>();
  const mine = scopes ?? [];
  const [refusal, setRefusal] = useState<SIEError>();
  const [signedIn, setSignedIn] = useState(0);
  const played = useRef<Route>(undefined); // what was typed there, and what came back, stays while another view is looked at
  const [wantsKey, setWantsKey] = useState(false); // where reading needs none

  const extras = useRef(new Map<string, Model>()); // of a catalogue that is not read whole: what was found, and what the address names
  const named = view === "playground" ? [route.parts.slice(1).join("/"), route.query.get("with") ?? ""].join(" ") : "";

  const showsModels = view !== "cluster";
  const search = total > MODELS ? wanted.trim() : ""; // else all models are here already
  useEffect(() => {
    let ended = false;
    let timer = 0;
    let everyMs = MODELS_EVERY_MS;
    let hasScopes = false;
    async function turn() {
      if (document.visibilityState === "visible") {
        try {
          const [who, now] = await Promise.all([hasScopes ? undefined : get<Whoami>("/v1/whoami"), known(search, named.split(" ").filter(Boolean), extras.current)]);
          if (ended) return;
          hasScopes = true;
          if (who) setScopes(who.scopes);
          setModels(now.models);
          everyMs = now.models.some((each) => each.state === "loading" || each.downloads.length) ? LOADING_EVERY_MS : MODELS_EVERY_MS;
          setTotal(now.total);
          setRefusal(undefined);
          if (!showsModels) return; // the first answer told whether the key is good, and the cluster has figures of its own
        } catch (error) {
          if (!(error instanceof SIEError)) throw error;
          if (ended) return;
          setRefusal(error);
        }
      }
      timer = window.setTimeout(turn, everyMs);
    }
    timer = window.setTimeout(turn, search ? TYPED_MS : 0);
    return () => {
      ended = true;
      window.clearTimeout(timer);
    };
  }, [signedIn, search, showsModels, named]);
  useEffect(() => {
    document.title = `${VIEWS[view]} · SIE`;
  }, [view]);

  function signIn(value: string) {
    setWantsKey(false);
    keep(value);
    setModels(undefined);
    setScopes(undefined);
    setRefusal(undefined);
    setSignedIn((count) => count + 1);
  }

  if (view === "playground") played.current = route;
  const playground = played.current;
  const isRefused = refusal && (refusal.status === 401 || refusal.status === 403);
  if (isRefused || wantsKey) return <SignIn refusal={isRefused ? refusal : undefined} onKey={signIn} onBack={isRefused ? undefined : () => setWantsKey(false)} />;
  const addressOf = (name: View): string => (name === "playground" && playground ? href(name, playground.parts, Object.fromEntries(playground.query)) : href(name));
  return (
    <>
      <header>
        <h1>SIE</h1>
        <nav aria-label="Views">
          {Object.entries(VIEWS).map(([name, title]) => (
            <a href={addressOf(name as View)} data-view={name} aria-current={view === name ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <span class="rest">
          <a href={address("docs")}>API</a>
          {key() ? <button type="button" class="link" id="sign-out" onClick={() => signIn("")}>Sign out</button>
            : models && !mine.includes("admin") && <button type="button" class="link" id="sign-in" onClick={() => setWantsKey(true)}>Sign in as administrator</button>}
        </span>
      </header>
      <main>
        {refusal && view !== "cluster" && <p class="bad" role="alert">{refusal.status ? refusal.message : "The gateway does not answer. This page asks again by itself."}</p>}
        {!models ? <p class="dim" role="status">{refusal && view !== "cluster" ? "" : "reading the catalogue"}</p>
          : view === "cluster" ? <Cluster key={signedIn} parts={route.parts} scopes={mine} />
          : view === "models" ? <Models models={models} total={total} route={route} onFind={setWanted} />
          : view === "jobs" && <Jobs key={signedIn} models={models} parts={route.parts} scopes={mine} onFind={setWanted} />}
        {models && playground && <div hidden={view !== "playground"}><Playground key={signedIn} models={models} route={playground} canInfer={mine.includes("infer")} onFind={setWanted} /></div>}
      </main>
    </>
  );
}

function SignIn({ refusal, onKey, onBack }: { refusal?: SIEError | undefined; onKey: (value: string) => void; onBack?: (() => void) | undefined }) {
  const [value, setValue] = useState("");
  return (
    <main class="sign-in">
      <form
        class="panel"
        onSubmit={(event) => {
          event.preventDefault();
          if (value.trim()) onKey(value.trim());
        }}
      >
        <h1>SIE</h1>
        <label>
          API key
          <input id="key" type="password" autocomplete="off" spellcheck={false} value={value} onInput={(event) => setValue(event.currentTarget.value)} />
        </label>
        {refusal && key() && <p class="bad" role="alert">{refusal.message}</p>}
        <span class="row">
          <button type="submit">Sign in</button>
          {onBack && <button type="button" onClick={onBack}>Continue without</button>}
        </span>
        <h2>Which key?</h2>
        <p>On the machine of a <code>sie serve</code>: the administrator's token is <code>admin_token</code> of the file <code>access.json</code> in its data directory, <code>~/.local/share/sie</code> unless it was started with another.</p>
        <p>Elsewhere: a key of <code>sie keys create</code>. What its scopes open here:</p>
        <dl class="pairs-of">
          <div><dt>read</dt><dd>models and the state of the cluster</dd></div>
          <div><dt>infer</dt><dd>the playground and jobs</dd></div>
          <div><dt>config</dt><dd>changes of models</dd></div>
          <div><dt>admin</dt><dd>load and unload, dead letters, the doctor</dd></div>
        </dl>
        <p class="dim">The key stays in this tab until it is closed, and is stored nowhere else.</p>
      </form>
    </main>
  );
}

const place = document.getElementById("app");
if (place) render(<App />, place);
