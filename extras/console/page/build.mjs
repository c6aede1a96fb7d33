// Build the console into the package `sie_console`, with the digest of its sources. The sources of the TypeScript client belong
// to them, because the client is bundled. A test that needs no Node compares the digest, and so finds an outdated build.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const output = new URL("../sie_console/built/", import.meta.url);
const sources = ["package-lock.json", ...["src", "../../../sdk-ts/src"].flatMap((folder) => readdirSync(folder).sort().map((name) => `${folder}/${name}`))];
const digest = createHash("sha256");
for (const name of sources) digest.update(name).update("\0").update(readFileSync(name)).update("\0");

await build({
  entryPoints: ["src/main.tsx", "src/style.css"],
  bundle: true,
  tsconfig: "tsconfig.json", // `paths` in it finds the sources of the client and their packages
  minify: true,
  format: "esm",
  target: ["es2022"],
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  outdir: output.pathname,
  entryNames: "[name]",
});
writeFileSync(new URL("index.html", output), readFileSync("src/index.html"));
writeFileSync(new URL("sources.sha256", output), `${digest.digest("hex")}\n`);
