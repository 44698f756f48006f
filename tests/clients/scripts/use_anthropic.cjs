// Anthropic's client for Node: messages whole and streamed, tools and results, counts and errors.
// Its arguments are those of the other scripts (checks.py).
const assert = require("node:assert/strict");
const { parseArgs } = require("node:util");
const Anthropic = require("@anthropic-ai/sdk");

const text = { type: "string" };
const given = parseArgs({ options: { url: text, key: text, model: text } }).values;
const baseURL = given.url.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey: given.key, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather?" }];
const answers = ["Yes.", "No."]; // a text that ends, of a model that would write on
const choice = { structured_outputs: { choice: answers } };
const cities = ["Paris", "Oslo"];
const weather = {
  name: "weather",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: cities } },
    required: ["city"],
    additionalProperties: false,
  },
};
const fields = { model: given.model, messages, max_tokens: 100 };

const checks = {
  async whole_and_streamed() {
    const message = await client.messages.create({ ...fields, ...choice });
    assert(answers.includes(message.content[0].text));
    assert.equal(message.stop_reason, "end_turn");
    const stream = client.messages.stream({ ...fields, ...choice });
    const pieces = [];
    stream.on("text", (piece) => pieces.push(piece));
    const last = await stream.finalMessage();
    assert.equal(last.content[0].text, pieces.join(""));
    assert(last.usage.output_tokens > 0);
  },

  async tools_in_two_turns() {
    const asked = { ...fields, tools: [weather] };
    const chosen = { tool_choice: { type: "tool", name: "weather" } };
    const message = await client.messages.stream({ ...asked, ...chosen }).finalMessage();
    const [call] = message.content;
    assert.deepEqual([call.type, call.name, message.stop_reason], ["tool_use", "weather", "tool_use"]);
    assert(cities.includes(call.input.city));
    const result = { type: "tool_result", tool_use_id: call.id, content: "It rains." };
    const turns = [{ role: "assistant", content: message.content }, { role: "user", content: [result] }];
    const more = { ...asked, ...choice, tool_choice: { type: "none" }, messages: [...messages, ...turns] };
    assert(answers.includes((await client.messages.create(more)).content[0].text));
  },

  async tokens_are_counted() {
    const asked = { model: given.model, messages, system: "Be brief." };
    const { input_tokens } = await client.beta.messages.countTokens(asked);
    const { usage } = await client.messages.create({ ...asked, max_tokens: 1 });
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },

  async errors_have_anthropics_types() {
    const other = new Anthropic({ baseURL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(other.messages.create(fields), Anthropic.AuthenticationError);
    await assert.rejects(client.messages.create({ ...fields, model: "none" }), Anthropic.NotFoundError);
    await assert.rejects(client.messages.create({ ...fields, max_tokens: 0 }), Anthropic.BadRequestError);
  },
};

(async () => {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`passed ${name}`);
    } catch (error) {
      console.log(`FAILED ${name}`, error);
      process.exitCode = 1;
    }
  }
})();
