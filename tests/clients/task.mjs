// An agent of three tools by the helpers of OpenAI's and Anthropic's clients for Node, as task.py: `node - LIBRARY TASK`.
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import OpenAI from "openai";

const [library, task] = process.argv.slice(2);
const model = "my-model", messages = [{ role: "user", content: task }];
const work = {
  read_file: ({ path }) => readFileSync(path, "utf8"),
  edit_file: ({ path, old, new: now }) => (writeFileSync(path, readFileSync(path, "utf8").replace(old, now)), "edited"),
  run_test: ({ path }) => execFileSync("python3", [path], { encoding: "utf8" }),
};
const takes = { read_file: ["path"], edit_file: ["path", "old", "new"], run_test: ["path"] };
const tools = Object.entries(takes).map(([name, required]) => ({
  name, description: name, run: work[name],
  schema: { type: "object", properties: Object.fromEntries(required.map((key) => [key, { type: "string" }])), required },
}));

if (library === "openai_node") {
  const functions = tools.map(({ name, description, run, schema }) => ({
    type: "function", function: { name, description, parameters: schema, function: run, parse: JSON.parse },
  }));
  console.log(await new OpenAI().chat.completions.runTools({ model, messages, tools: functions, stream: true }).finalContent());
} else {
  const runner = new Anthropic().beta.messages.toolRunner({
    model, messages, max_tokens: 4000, stream: true,
    tools: tools.map(({ name, description, run, schema }) => betaTool({ name, description, run, inputSchema: schema })),
  });
  let last;
  for await (const stream of runner) last = await stream.finalMessage();
  console.log(last.content.map((block) => block.text ?? "").join(""));
}
