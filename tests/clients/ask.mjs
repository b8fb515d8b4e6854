// The official client for Node, as its users write it. Prints one JSON object, which the test looks at.
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 8 };

async function refusal(work) {
  try {
    await work();
    return null;
  } catch (error) {
    const { status, code, param, message } = error;
    return { kind: error.constructor.name, status, code, param, message };
  }
}

async function streamed() {
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  let text = "", usage = null, chunks = 0;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
    chunks += 1;
  }
  return { text, usage, chunks };
}

const models = [];
for await (const card of client.models.list()) models.push(card.id);
const { data: whole, response } = await client.chat.completions.create(asked).withResponse();
const schema = { type: "object", properties: { n: { type: "integer" } }, required: ["n"], additionalProperties: false };
const format = { type: "json_schema", json_schema: { name: "number", schema, strict: true } };
const shaped = await client.chat.completions.create({ ...asked, max_completion_tokens: 60, response_format: format });
const labelled = await client.chat.completions.create({
  ...asked, metadata: { chat: "7" }, service_tier: "auto", store: false, user: "me", safety_identifier: "me",
});
const finished = await client.chat.completions.stream(asked).finalContent();
console.log(JSON.stringify({
  models,
  text: whole.choices[0].message.content,
  usage: whole.usage,
  requestId: response.headers.get("x-request-id"),
  streamed: await streamed(),
  finished,
  shaped: shaped.choices[0],
  tier: labelled.service_tier,
  response: (await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 8 })).output_text,
  completion: (await client.completions.create({ model, prompt: "One, two,", max_tokens: 4 })).choices[0].text,
  badField: await refusal(() => client.chat.completions.create({ ...asked, temprature: 1 })),
  badModel: await refusal(() => client.chat.completions.create({ ...asked, model: "other" })),
  embeddings: await refusal(() => client.embeddings.create({ model, input: "a" })),
}));
