import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { SIEError } from "sie-client";
import { urlOf, getJson, storeKey, readKey } from "./api";
import { Cluster } from "./cluster";
import { shellCommand } from "./code";
import { CodeSamples } from "./code-samples";
import { Jobs } from "./jobs";
import { modelPath } from "./model-properties";
import { Models } from "./models";
import { recent } from "./picker";
import { Playground } from "./playground";
import { href, type Route, useRoute, VIEWS, type View } from "./routes";
import { SessionContext } from "./session";
import type { Model, Models as Listed, Whoami } from "./types";

const MODELS_EVERY_MS = 5_000;
const LOADING_EVERY_MS = 2_000; // while something is loaded or downloaded
const MODELS = 200; // that are read; a search finds others
const TYPED_MS = 250; // of rest, after which what was typed is asked for

const listed = (filter: Record<string, string> = {}): Promise<Listed> => getJson<Listed>(`/v1/models?${new URLSearchParams({ limit: `${MODELS}`, ...filter })}`);

/** A model, undefined where there is none of this name. */
const modelOf = (id: string): Promise<Model | undefined> =>
  getJson<Model>(modelPath(id)).catch((error: unknown) => {
    if (error instanceof SIEError && error.status === 404) return undefined;
    throw error;
  });

/** The first models of the catalogue. Of one that is larger also those that are loaded, that `named` names, and that were
 * searched, which stay in `found`. */
async function modelsOf(search: string, named: string[], cached: Map<string, Model>): Promise<{ models: Model[]; total: number }> {
  const [first, searched] = await Promise.all([listed(), search ? listed({ filter: search }) : undefined]);
  const total = first.total ?? 0;
  if (total <= MODELS) return { models: first.models, total };
  for (const model of searched?.models ?? []) cached.set(model.id, model);
  const [loaded, ...rest] = await Promise.all([listed({ loaded: "true" }), ...named.filter((id) => !first.models.some((model) => model.id === id)).map(modelOf)]);
  const all = [...cached.values(), ...rest.filter((model) => model !== undefined), ...loaded.models, ...first.models];
  return { models: [...new Map(all.map((model) => [model.id, model])).values()], total };
}

function App() {
  const route = useRoute();
  const { view } = route;
  const [models, setModels] = useState<Model[]>();
  const [total, setTotal] = useState(0);
  const [typedSearch, setTypedSearch] = useState("");
  const [scopes, setScopes] = useState<string[]>();
  const mine = scopes ?? [];
  const [refusal, setRefusal] = useState<SIEError>();
  const [signedIn, setSignedIn] = useState(0);
  const played = useRef<Route>(undefined); // what was typed there, and what came back, stays while another view is looked at
  const [wantsKey, setWantsKey] = useState(false); // where reading needs none

  const cached = useRef(new Map<string, Model>()); // by searches of a catalogue that is not read whole
  const named = view === "playground" ? [route.parts.slice(1).join("/"), route.query.get("with") ?? ""].join(" ") : "";

  const showsModels = view !== "cluster";
  const search = total > MODELS ? typedSearch.trim() : ""; // else all models are here already
  useEffect(() => {
    let ended = false;
    let timer = 0;
    let everyMs = MODELS_EVERY_MS;
    let hasScopes = false;
    async function turn() {
      if (document.visibilityState === "visible") {
        try {
          const [identity, now] = await Promise.all([hasScopes ? undefined : getJson<Whoami>("/v1/whoami"), modelsOf(search, [...new Set([...named.split(" "), ...recent()])].filter(Boolean), cached.current)]);
          if (ended) return;
          hasScopes = true;
          if (identity) setScopes(identity.scopes);
          setModels(now.models);
          everyMs = now.models.some((model) => model.state === "loading" || model.downloads.length) ? LOADING_EVERY_MS : MODELS_EVERY_MS;
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
    storeKey(value);
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
    <SessionContext.Provider value={{ scopes: mine, signIn: () => setWantsKey(true), unread: Math.max(0, total - (models?.length ?? 0)) }}>
      <header>
        <h1>SIE</h1>
        <nav aria-label="Views">
          {Object.entries(VIEWS).map(([name, title]) => (
            <a href={addressOf(name as View)} data-view={name} aria-current={view === name ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <span class="rest">
          <a href={urlOf("docs")}>API</a>
          {readKey() ? <button type="button" class="link" id="sign-out" onClick={() => signIn("")}>Sign out</button>
            : models && !mine.includes("admin") && <button type="button" class="link" id="sign-in" onClick={() => setWantsKey(true)}>Sign in as administrator</button>}
        </span>
      </header>
      <main>
        {refusal && view !== "cluster" && <p class="bad" role="alert">{refusal.status ? refusal.message : "The gateway does not answer. This page asks again by itself."}</p>}
        {!models ? <p class="dim" role="status">{refusal && view !== "cluster" ? "" : "reading the catalogue"}</p>
          : view === "cluster" ? <Cluster key={signedIn} route={route} />
          : view === "models" ? <Models models={models} total={total} route={route} onFind={setTypedSearch} />
          : view === "jobs" && <Jobs key={signedIn} models={models} parts={route.parts} onFind={setTypedSearch} />}
        {models && playground && <div hidden={view !== "playground"}><Playground key={signedIn} models={models} route={playground} onFind={setTypedSearch} /></div>}
      </main>
    </SessionContext.Provider>
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
        {refusal && readKey() && <p class="bad" role="alert">{refusal.message}</p>}
        <span class="row">
          <button type="submit">Sign in</button>
          {onBack && <button type="button" onClick={onBack}>Continue without</button>}
        </span>
        <h2>Which key?</h2>
        <p>In a terminal on the machine of a <code>sie serve</code>, this prints the administrator's token. If the server was started with <code>--data-dir FOLDER</code>, add the same.</p>
        <CodeSamples title="" programs={[shellCommand("sie keys admin")]} open />
        <p>Elsewhere: a key that <code>sie keys create NAME</code> prints. What its scopes open here:</p>
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
