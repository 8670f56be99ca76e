// Copies the files the page needs out of node_modules into static/vendor, and writes manifest.json beside them with
// each file's package, version, licence and SHA-256. Run by `make vendor`; tests/e2e/page/test_files.py holds the
// files against the manifest.
//
// The page has no build step, so bare imports ("preact") are rewritten to the files beside them ("./preact.js"):
// an import map would have to be inline, and the page's content policy allows no inline script.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const modules = join(here, "node_modules");
const target = join(here, "static", "vendor");

const languages = [
  "bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "markdown",
  "python", "rust", "shell", "sql", "typescript", "xml", "yaml",
];

// [package, path inside it, name in static/vendor]
const files = [
  ["preact", "dist/preact.mjs", "preact.js"],
  ["preact", "hooks/dist/hooks.mjs", "preact-hooks.js"],
  ["@preact/signals", "dist/signals.mjs", "signals.js"],
  ["@preact/signals-core", "dist/signals-core.mjs", "signals-core.js"],
  ["htm", "dist/htm.mjs", "htm.js"],
  ["marked", "lib/marked.esm.js", "marked.js"],
  ["dompurify", "dist/purify.es.mjs", "dompurify.js"],
  ["@highlightjs/cdn-assets", "es/core.min.js", "highlight/core.js"],
  ...languages.map((name) => ["@highlightjs/cdn-assets", `es/languages/${name}.min.js`, `highlight/${name}.js`]),
  ...["latin", "latin-ext"].flatMap((subset) =>
    ["normal", "italic"].map((style) => [
      "@fontsource-variable/literata", `files/literata-${subset}-wght-${style}.woff2`, `fonts/literata-${subset}-${style}.woff2`,
    ])),
];

const bareImports = {
  preact: "./preact.js",
  "preact/hooks": "./preact-hooks.js",
  "@preact/signals-core": "./signals-core.js",
};

function servable(source) {
  return source
    .replace(/\bfrom\s*"([^"]+)"/g, (whole, name) => (name in bareImports ? `from"${bareImports[name]}"` : whole))
    .replace(/\n?\/\/# sourceMappingURL=\S*\s*$/, "\n");
}

const sha256 = (data) => createHash("sha256").update(data).digest("hex");

rmSync(target, { recursive: true, force: true });
const manifest = { packages: {}, files: {} };
for (const [name, path, output] of files) {
  const description = JSON.parse(readFileSync(join(modules, name, "package.json"), "utf8"));
  const original = readFileSync(join(modules, name, path));
  const data = output.endsWith(".js") ? servable(original.toString("utf8")) : original;
  mkdirSync(dirname(join(target, output)), { recursive: true });
  writeFileSync(join(target, output), data);
  manifest.files[output] = { package: name, source: path, sha256: sha256(data) };
  if (!(name in manifest.packages)) {
    const licenceFile = `licenses/${name.replace(/^@/, "").replace("/", "-")}.txt`;
    mkdirSync(join(target, "licenses"), { recursive: true });
    cpSync(join(modules, name, "LICENSE"), join(target, licenceFile));
    manifest.packages[name] = { version: description.version, license: description.license, text: licenceFile };
    manifest.files[licenceFile] = { package: name, source: "LICENSE", sha256: sha256(readFileSync(join(target, licenceFile))) };
  }
}
writeFileSync(join(target, "manifest.json"), `${JSON.stringify(manifest, null, 2)}\n`);
console.log(`${Object.keys(manifest.files).length} files in static/vendor`);
