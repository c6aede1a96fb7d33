import { useState } from "preact/hooks";
import { type NamedInput, Bars, imageOf, shorten } from "./playground-shared";
import { Values, valuesOf } from "./playground-values";
import { Table } from "./table";
import type { Entity, DetectedObject, Relation, Reply, Slot } from "./types";

const COLOURS = 6;
const MOST_LEAVES = 100; // of a list of the tree that are drawn

/** `params`: of the request. */
export function ExtractResult({ reply, inputs, params }: { reply: Reply; inputs: NamedInput[]; params: Record<string, unknown> }) {
  const threshold = params["threshold"]; // undefined where the model's own applied
  const isTyped = "output_schema" in params || "label_groups" in params;
  const emptyText = `Nothing was found ${threshold === undefined ? "at the model's own threshold" : `at the threshold ${threshold}`}. A lower threshold or other labels may find something.`;
  return <>{reply.items?.map((item, place) => !item.error && <One item={item} input={inputs[place]} place={place} emptyText={emptyText} isTyped={isTyped} />)}</>;
}

function One({ item, input, place, emptyText, isTyped }: { item: Slot; input: NamedInput | undefined; place: number; emptyText: string; isTyped: boolean }) {
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
      <h3>{`${place + 1} ${shorten(input?.name ?? "", 80)}`}</h3>
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
      {isTyped && !empty && <Values values={valuesOf(item)} />}
      {!isTyped && Object.keys(data).length > 0 && <><h3>Data</h3><ul class="tree"><Tree name="data" value={data} open /></ul></>}
    </div>
  );
}

/** What is drawn on a picture, in the colour of its kind. */
interface Box extends DetectedObject {
  kind: string;
}

export type Span = Entity & { start: number; end: number };
const isBoxed = (entity: Entity): entity is Entity & { bbox: number[] } => Array.isArray(entity.bbox);

/** Pieces of a text: those that are in an entity, and those between. Of entities that overlap the first is drawn. Places
 * are code points. */
function pieces(text: string, entities: Span[]): { text: string; entity?: Span }[] {
  const points = [...text];
  const parts: { text: string; entity?: Span }[] = [];
  let at = 0;
  for (const entity of [...entities].sort((a, b) => a.start - b.start)) {
    if (entity.start < at) continue;
    if (entity.start > at) parts.push({ text: points.slice(at, entity.start).join("") });
    parts.push({ text: points.slice(entity.start, entity.end).join(""), entity });
    at = entity.end;
  }
  if (at < points.length) parts.push({ text: points.slice(at).join("") });
  return parts;
}

export function MarkedText({ text, entities }: { text: string; entities: Span[] }) {
  return (
    <p class="spans">
      {pieces(text, entities).map((piece) =>
        piece.entity ? <mark title={piece.entity.score.toFixed(4)}>{piece.text}<small>{piece.entity.label}</small></mark> : piece.text,
      )}
    </p>
  );
}

/** Boxes over the picture. A browser turns an image as its EXIF says, and boxes are in pixels of the image so turned. */
function Boxes({ picture, name, boxes, polygons }: { picture: string; name: string; boxes: Box[]; polygons: number[][][] }) {
  const [[width, height], setSize] = useState<[number, number]>([0, 0]);
  const [least, setLeast] = useState(0);
  const kinds = [...new Set(boxes.map((box) => box.kind))];
  const colour = (kind: string): string => `box-${kinds.indexOf(kind) % COLOURS}`;
  const shown = boxes.map((box, place) => ({ ...box, place })).filter((box) => box.score >= least);
  const letters = Math.max(width, height) / 26;
  const top = Math.max(0, ...boxes.map((box) => box.score));
  return (
    <>
      <div class="picture">
        <img src={picture} alt={name} onLoad={(event) => setSize([event.currentTarget.naturalWidth, event.currentTarget.naturalHeight])} />
        {width > 0 && boxes.length > 0 && (
          <svg class="boxes" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={`${shown.length} boxes`}>
            {shown.map(({ bbox: [x = 0, y = 0, w = 0, h = 0], label, kind, score, place }) => (
              <g class={colour(kind)}>
                <title>{`${place + 1} ${label} ${score.toFixed(4)}`}</title>
                {polygons[place]?.map((outline) => <polygon points={outline.join(" ")} />)}
                <rect x={x} y={y} width={w} height={h} />
                <text x={x + letters / 5} y={y > letters ? y - letters / 4 : y + letters} font-size={letters}>{place + 1}</text>
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
            {shown.map(({ label, kind, score, bbox, place }) => (
              <tr><th scope="row" class="wrap"><span class={`swatch ${colour(kind)}`} aria-hidden="true" />{`${place + 1} ${label}`}</th><td class="number">{score.toFixed(4)}</td><td>{bbox.join(", ")}</td></tr>
            ))}
          </Table>
        </>
      )}
    </>
  );
}

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
            {entries.slice(0, MOST_LEAVES).map(([inner, member]) => <Tree name={inner} value={member} open={entries.length <= 3} />)}
            {entries.length > MOST_LEAVES && <li class="dim">{`and ${entries.length - MOST_LEAVES} more`}</li>}
          </ul>
        )}
      </Branch>
    </li>
  );
}

/** Details whose content is made when they open: the tree of a document may have a hundred thousand leaves. */
function Branch({ open, title, children }: { open: boolean; title: preact.ComponentChild; children: () => preact.ComponentChild }) {
  const [isOpen, setOpen] = useState(open);
  return (
    <details open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{title}</summary>
      {isOpen && children()}
    </details>
  );
}
