// Builds the console into the gateway's package, with the digest of its sources and those of the TypeScript client, which
// is bundled from its sources: a test compares it, so a page that was not built anew after a change is found without Node.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const target = new URL("../gateway/sie_gateway/console/", import.meta.url);
const sources = ["package-lock.json", ...["src", "../sdk-ts/src"].flatMap((folder) => readdirSync(folder).sort().map((name) => `${folder}/${name}`))];
const digest = createHash("sha256");
for (const name of sources) digest.update(name).update("\0").update(readFileSync(name)).update("\0");

await build({
  entryPoints: ["src/main.tsx", "src/style.css"],
  bundle: true,
  tsconfig: "tsconfig.json", // of the client's sources too: its name and its packages are found by `paths`
  minify: true,
  format: "esm",
  target: ["es2022"],
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  outdir: target.pathname,
  entryNames: "[name]",
});
writeFileSync(new URL("index.html", target), readFileSync("src/index.html"));
writeFileSync(new URL("sources.sha256", target), `${digest.digest("hex")}\n`);
