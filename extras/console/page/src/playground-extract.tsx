import { useState } from "preact/hooks";
import { type NamedInput, Bars, imageOf, shorten } from "./playground-shared";
import { Values, valuesOf } from "./playground-values";
import { Table } from "./table";
import type { Entity, DetectedObject, Relation, Reply, ItemResult } from "./types";

const COLOURS = 6;
const MAX_ENTRIES = 100; // of each list of the tree

/** The results of an extraction, one for each input. `params` are those of the request. */
export function ExtractResult({ reply, inputs, params }: { reply: Reply; inputs: NamedInput[]; params: Record<string, unknown> }) {
  const threshold = params["threshold"]; // undefined if the model's own applied
  const hasSchema = "output_schema" in params || "label_groups" in params;
  const emptyText = `Nothing was found ${threshold === undefined ? "at the model's own threshold" : `at the threshold ${threshold}`}. A lower threshold or other labels may find something.`;
  return <>{reply.items?.map((item, index) => !item.error && <ItemExtraction item={item} input={inputs[index]} index={index} emptyText={emptyText} hasSchema={hasSchema} />)}</>;
}

/** The result of an extraction for one input. */
function ItemExtraction({ item, input, index, emptyText, hasSchema }: { item: ItemResult; input: NamedInput | undefined; index: number; emptyText: string; hasSchema: boolean }) {
  const { entities = [], objects = [], relations = [], classifications = [], data = {} } = item;
  const picture = imageOf(input?.input);
  const spans = entities.filter((entity): entity is Span => entity.start !== null && entity.end !== null);
  const boxes: Box[] = [
    ...objects.map((object) => ({ ...object, kind: object.label })),
    ...entities.filter(isBoxed).map(({ label, text, score, bbox }) => ({ label: text ? `${label}: ${text}` : label, score, bbox, kind: label })),
  ];
  const loose = entities.filter((entity) => entity.start === null);
  const polygons = Array.isArray(data["polygons"]) ? (data["polygons"] as number[][][]) : [];
  const empty = !entities.length && !objects.length && !relations.length && !classifications.length && !Object.keys(data).length;
  return (
    <div class="extracted">
      <h3>{`${index + 1} ${shorten(input?.name ?? "", 80)}`}</h3>
      {empty && <p class="dim">{emptyText}</p>}
      {input?.input.text && (spans.length > 0 || (empty && !picture)) && <MarkedText text={input.input.text} entities={spans} />}
      {picture && <Boxes picture={picture} name={input?.name ?? ""} boxes={boxes} polygons={polygons} />}
      {loose.length > 0 && (
        <>
          <h3>Entities</h3>
          <Table label="Entities" class="entities" role="group" columns={["label", "text", { number: "score" }]}>
            {loose.map((entity) => <tr><th scope="row">{entity.label}</th><td class="wrap">{entity.text}</td><td class="number">{entity.score.toFixed(4)}</td></tr>)}
          </Table>
        </>
      )}
      {classifications.length > 0 && <><h3>Classes</h3><Bars label="Classes" least={0} most={1} rows={classifications.map(({ label, score }) => ({ name: label, value: score }))} /></>}
      {relations.length > 0 && <Relations relations={relations} />}
      {hasSchema && !empty && <Values values={valuesOf(item)} />}
      {!hasSchema && Object.keys(data).length > 0 && <><h3>Data</h3><ul class="tree"><Tree name="data" value={data} open /></ul></>}
    </div>
  );
}

/** A box on a picture, in the colour of its kind. */
interface Box extends DetectedObject {
  kind: string;
}

type Span = Entity & { start: number; end: number };
const isBoxed = (entity: Entity): entity is Entity & { bbox: number[] } => Array.isArray(entity.bbox);

/** Split a text into the entities and the pieces between them. Of entities that overlap, the first is kept. `start` and
 * `end` count code points. */
function splitText(text: string, entities: Span[]): { text: string; entity?: Span }[] {
  const points = [...text];
  const parts: { text: string; entity?: Span }[] = [];
  let end = 0;
  for (const entity of [...entities].sort((a, b) => a.start - b.start)) {
    if (entity.start < end) continue;
    if (entity.start > end) parts.push({ text: points.slice(end, entity.start).join("") });
    parts.push({ text: points.slice(entity.start, entity.end).join(""), entity });
    end = entity.end;
  }
  if (end < points.length) parts.push({ text: points.slice(end).join("") });
  return parts;
}

/** A text whose entities are marked. */
export function MarkedText({ text, entities }: { text: string; entities: Span[] }) {
  return (
    <p class="spans">
      {splitText(text, entities).map((piece) =>
        piece.entity ? <mark title={piece.entity.score.toFixed(4)}>{piece.text}<small>{piece.entity.label}</small></mark> : piece.text,
      )}
    </p>
  );
}

/** Boxes over a picture. The browser turns the image by its EXIF orientation; the boxes are in pixels of the turned image. */
function Boxes({ picture, name, boxes, polygons }: { picture: string; name: string; boxes: Box[]; polygons: number[][][] }) {
  const [[width, height], setSize] = useState<[number, number]>([0, 0]);
  const [least, setLeast] = useState(0);
  const kinds = [...new Set(boxes.map((box) => box.kind))];
  const colour = (kind: string): string => `box-${kinds.indexOf(kind) % COLOURS}`;
  const shown = boxes.map((box, index) => ({ ...box, index })).filter((box) => box.score >= least);
  const fontSize = Math.max(width, height) / 26;
  const top = Math.max(0, ...boxes.map((box) => box.score));
  return (
    <>
      <div class="picture">
        <img src={picture} alt={name} onLoad={(event) => setSize([event.currentTarget.naturalWidth, event.currentTarget.naturalHeight])} />
        {width > 0 && boxes.length > 0 && (
          <svg class="boxes" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={`${shown.length} boxes`}>
            {shown.map(({ bbox: [x = 0, y = 0, w = 0, h = 0], label, kind, score, index }) => (
              <g class={colour(kind)}>
                <title>{`${index + 1} ${label} ${score.toFixed(4)}`}</title>
                {polygons[index]?.map((outline) => <polygon points={outline.join(" ")} />)}
                <rect x={x} y={y} width={w} height={h} />
                <text x={x + fontSize / 5} y={y > fontSize ? y - fontSize / 4 : y + fontSize} font-size={fontSize}>{index + 1}</text>
              </g>
            ))}
          </svg>
        )}
      </div>
      {boxes.length > 0 && (
        <>
          <label>
            {`Least score that is drawn: ${least.toFixed(2)} (${shown.length} of ${boxes.length} boxes)`}
            <input class="least" type="range" min={0} max={Math.ceil(top * 100) / 100} step={0.01} value={least} onInput={(event) => setLeast(Number(event.currentTarget.value))} />
          </label>
          <Table label="Boxes" class="found" role="group" isTall columns={["box", { number: "score" }, "x, y, width, height in pixels"]}>
            {shown.map(({ label, kind, score, bbox, index }) => (
              <tr><th scope="row" class="wrap"><span class={`swatch ${colour(kind)}`} aria-hidden="true" />{`${index + 1} ${label}`}</th><td class="number">{score.toFixed(4)}</td><td>{bbox.join(", ")}</td></tr>
            ))}
          </Table>
        </>
      )}
    </>
  );
}

/** The relations of a text as a table. */
function Relations({ relations }: { relations: Relation[] }) {
  return (
    <>
      <h3>Relations</h3>
      <Table label="Relations" class="relations" role="group" columns={["head", "relation", "tail", { number: "score" }]}>
        {relations.map((relation) => (
          <tr>
            <td>{relation.head}</td>
            <td class="arrow"><span>{relation.relation}</span></td>
            <td>{relation.tail}</td>
            <td class="number">{relation.score.toFixed(4)}</td>
          </tr>
        ))}
      </Table>
    </>
  );
}

/** A value of the data as a tree that unfolds. */
function Tree({ name, value, open = false }: { name: string; value: unknown; open?: boolean }) {
  if (value === null || typeof value !== "object") {
    return <li><span class="dim">{`${name}: `}</span><span class="leaf">{typeof value === "string" ? value : JSON.stringify(value)}</span></li>;
  }
  const entries = Object.entries(value);
  const count = `${entries.length} ${Array.isArray(value) ? "element" : "field"}${entries.length === 1 ? "" : "s"}`;
  return (
    <li>
      <Branch open={open} title={<>{name} <small class="dim">{count}</small></>}>
        {() => (
          <ul>
            {entries.slice(0, MAX_ENTRIES).map(([inner, member]) => <Tree name={inner} value={member} open={entries.length <= 3} />)}
            {entries.length > MAX_ENTRIES && <li class="dim">{`and ${entries.length - MAX_ENTRIES} more`}</li>}
          </ul>
        )}
      </Branch>
    </li>
  );
}

/** Details whose content is rendered when they open: the tree of a document may have a hundred thousand leaves. */
function Branch({ open, title, children }: { open: boolean; title: preact.ComponentChild; children: () => preact.ComponentChild }) {
  const [isOpen, setOpen] = useState(open);
  return (
    <details open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{title}</summary>
      {isOpen && children()}
    </details>
  );
}
