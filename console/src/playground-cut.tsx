import { type Asked, useAnswer } from "./playground-parts";
import type { Call } from "./playground-requests";
import type { Model, Reply, Token } from "./types";

const SHOWN = 600; // characters of what was cut

const SHIFTING = ["instruction", "is_query", "truncate"]; // parameters that change which tokens of a text are read

/** Where the texts end that the model read a part of. The tokens that a prompt adds are not told, so nothing is said of a
 * model that has prompts, nor of a request that names one. */
export function Cut({ model, call, reply, asked }: { model: Model; call: Call; reply: Reply; asked: Asked[] }) {
  const places = reply.usage.truncated_items.filter((place) => asked[place]?.input.text);
  const isKnown = places.length > 0 && !Object.keys(model.prompt_texts).length && !SHIFTING.some((name) => name in (call.body.params ?? {}));
  const texts = places.map((place) => asked[place]?.input.text ?? "");
  const tokens = useAnswer<Token[][]>(isKnown ? `/tei/${model.id}/tokenize` : "", { inputs: texts });
  if (!tokens.value) return null;
  return (
    <>
      {places.map((place, at) => <One key={place} place={place} text={texts[at] ?? ""} tokens={tokens.value?.[at] ?? []} read={reply.items?.[place]?.usage?.prompt_tokens ?? 0} />)}
    </>
  );
}

/** Whether a model did not read a token: it reads `read` tokens, the last of which is the special one at the end. */
export const isCut = (token: Token, order: number, read: number): boolean => order >= read - 1 && !token.special;

function One({ place, text, tokens, read }: { place: number; text: string; tokens: Token[]; read: number }) {
  const first = tokens.find((token, order) => isCut(token, order, read) && token.start !== null);
  if (!first) return null;
  const written = new TextEncoder().encode(text);
  const decoder = new TextDecoder();
  const [kept, cut] = [decoder.decode(written.slice(0, first.start ?? 0)), decoder.decode(written.slice(first.start ?? 0))];
  return (
    <>
      <h3>{`What was cut of text ${place + 1}: the model reads ${read} of its ${tokens.length} tokens`}</h3>
      <p class="tokens">
        {`${kept.length > SHOWN / 4 ? "…" : ""}${kept.slice(-SHOWN / 4)}`}
        <mark class="cut">{`${cut.slice(0, SHOWN)}${cut.length > SHOWN ? `… ${cut.length - SHOWN} more characters` : ""}`}</mark>
      </p>
    </>
  );
}
