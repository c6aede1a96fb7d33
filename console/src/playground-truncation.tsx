import { type NamedInput, useReply } from "./playground-shared";
import type { Call } from "./playground-requests";
import type { Model, Reply, Token } from "./types";

const SHOWN = 600; // characters of what was cut

const SHIFTING = ["instruction", "default_instruction", "input_type", "truncate", "query_template", "doc_template"]; // parameters that change what is read

/** What a model puts before a text, none where it puts something behind it too or where the request decides. */
function promptOf(model: Model, params: Record<string, unknown>): string | undefined {
  if (SHIFTING.some((name) => name in params) || "default_instruction" in model.prompt_texts) return undefined;
  const template = model.prompt_texts[params["is_query"] === true ? "query" : "document"] ?? "{text}";
  const [before = "", after] = template.split("{text}");
  return after === "" && !before.includes("{instruction}") ? before : undefined;
}

/** Where the texts end that the model read a part of. Nothing is said where more than a prompt before the text is read with
 * it, such as the query of a pair. */
export function TruncatedTexts({ model, call, reply, inputs }: { model: Model; call: Call; reply: Reply; inputs: NamedInput[] }) {
  const places = reply.usage.truncated_items.filter((place) => inputs[place]?.input.text);
  const prompt = promptOf(model, call.body.params ?? {});
  const isKnown = places.length > 0 && prompt !== undefined;
  const texts = places.map((place) => `${prompt}${inputs[place]?.input.text ?? ""}`);
  const tokens = useReply<Token[][]>(isKnown ? `/tei/${model.id}/tokenize` : "", { inputs: texts });
  if (!tokens.value) return null;
  return (
    <>
      {places.map((place, at) => <One key={place} place={place} text={texts[at] ?? ""} tokens={tokens.value?.[at] ?? []} read={reply.items?.[place]?.usage?.prompt_tokens ?? 0} />)}
    </>
  );
}

/** Whether a model did not read a token: it reads `read` tokens, the last of which is the special one at the end. */
export const isTruncated = (token: Token, order: number, read: number): boolean => order >= read - 1 && !token.special;

function One({ place, text, tokens, read }: { place: number; text: string; tokens: Token[]; read: number }) {
  const first = tokens.find((token, order) => isTruncated(token, order, read) && token.start !== null);
  if (!first) return null;
  const written = new TextEncoder().encode(text);
  const decoder = new TextDecoder();
  const [head, cut] = [decoder.decode(written.slice(0, first.start ?? 0)), decoder.decode(written.slice(first.start ?? 0))];
  return (
    <>
      <h3>{`What was cut of text ${place + 1}: the model reads ${read} of its ${tokens.length} tokens`}</h3>
      <p class="tokens">
        {`${head.length > SHOWN / 4 ? "…" : ""}${head.slice(-SHOWN / 4)}`}
        <mark class="cut">{`${cut.slice(0, SHOWN)}${cut.length > SHOWN ? `… ${cut.length - SHOWN} more characters` : ""}`}</mark>
      </p>
    </>
  );
}
