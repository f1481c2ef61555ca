#include <signal.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>

#include "api_fixture.h"
#include "app/program.h"
#include "app/terminal_program.h"
#include "base/file.h"

// `quern chat` on a terminal and through a pipe, against a server whose model follows a script.

namespace quern::app {
namespace {

using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using quern::testing::TerminalProgram;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

class TerminalChat : public server::ApiTest {
 protected:
  void SetUp() override {
    start();
    says("A thought.\n</think>\n\nHello.");
  }
  void says(const std::string& text) {
    engine_.set_writer([text](const engine::GenerationRequest&) { return server::say(text); });
  }
  [[nodiscard]] std::string url() const { return fmt::format("http://127.0.0.1:{}", port()); }
  [[nodiscard]] std::string prompt_of(size_t request) const {
    return server::standin_tokenizer().decode(engine_.submitted().at(request).prompt, false);
  }
  [[nodiscard]] std::vector<std::string> environment() const { return {"XDG_STATE_HOME=" + folder_.path().string()}; }
  std::unique_ptr<TerminalProgram> chat(std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"chat", "--base-url", url() + "/v1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    auto program = std::make_unique<TerminalProgram>(arguments, environment());
    program->read_until("> ");
    return program;
  }
  /// `text` as one shell command, its stdout.
  struct Piped {
    int exit_code;
    std::string output;
  };
  Piped pipe(const std::string& command) {
    const std::string line = fmt::format("cd {} && {} 2>stderr", folder_.path().string(), command);
    FILE* stream = popen(line.c_str(), "r");
    Piped result{-1, {}};
    char buffer[4096];
    while (const size_t got = std::fread(buffer, 1, sizeof buffer, stream)) result.output.append(buffer, got);
    const int status = pclose(stream);
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return result;
  }

  TemporaryFolder folder_;
};

TEST_F(TerminalChat, StreamsAnAnswerWithItsReasoningDimAndFigures) {
  const auto program = chat();
  engine_.hold();
  program->type("What is up?\r");
  engine_.permit(3);
  program->read_until("\033[2mA thought");
  engine_.let_run();
  EXPECT_THAT(program->read_until("Hello."), HasSubstr("\r\n\033[0m\r\nHello."));
  EXPECT_THAT(program->read_until("cached]"), HasSubstr("tok/s, first token after "));
  program->read_until("> ");
  program->type("And again?\r");
  program->read_until("Hello.");
  EXPECT_THAT(prompt_of(1), HasSubstr("What is up?"));
  EXPECT_THAT(prompt_of(1), HasSubstr("Hello."));
  program->read_until("> ");
  program->type("\x04");
  EXPECT_EQ(program->wait(), 0);
}

TEST_F(TerminalChat, CtrlCStopsTheAnswerAndNotTheProgram) {
  std::string words = "</think>\n\n";
  for (int i = 0; i < 60; ++i) words += "word ";
  says(words);
  const auto program = chat();
  engine_.hold();
  program->type("Go on\r");
  engine_.permit(12);
  program->read_until("word word");
  program->type("\x03");
  program->read_until("stopped]");
  EXPECT_TRUE(engine_.wait_until_idle()) << "the server goes on with an answer that nobody wants";
  engine_.let_run();
  program->read_until("> ");
  says("</think>\n\nNext.");
  program->type("next\r");
  program->read_until("Next.");
  EXPECT_THAT(prompt_of(1), HasSubstr("word word")) << "what there was of the answer is part of the conversation";
  program->read_until("> ");
  program->type("half a line\x03");
  program->read_until("leaves)");
  program->read_until("> ");
  program->type("/quit\r");
  EXPECT_EQ(program->wait(), 0);
  EXPECT_EQ(engine_.submitted().size(), 2u);
}

TEST_F(TerminalChat, MessagesHaveLinesAndCanBeEditedAndPasted) {
  const auto program = chat();
  program->type("first\\\rsecond\033\rthird\nfourthX\x7f\x01zero \r");
  program->read_until("cached]");
  EXPECT_THAT(prompt_of(0), HasSubstr("user\nfirst\nsecond\nthird\nzero fourth<|im_end|>"));
  program->type("\033[200~pasted\r\nlines\033[2J\tend\033[201~\r");
  program->read_until("cached]");
  EXPECT_THAT(prompt_of(1), HasSubstr("user\npasted\nlines[2J\tend<|im_end|>"));
  program->type("wörd 你好\033[D\x7f\r");
  program->read_until("cached]");
  EXPECT_THAT(prompt_of(2), HasSubstr("user\nwörd 好<|im_end|>"));
}

TEST_F(TerminalChat, KeepsAHistoryForTheNextTime) {
  {
    const auto program = chat();
    program->type("one\r");
    program->read_until("cached]");
    program->type("two\r");
    program->read_until("cached]");
    program->type("\x04");
    EXPECT_EQ(program->wait(), 0);
  }
  const auto program = chat();
  program->type("\033[A\033[A!\r");
  program->read_until("cached]");
  EXPECT_THAT(prompt_of(2), HasSubstr("user\none!<|im_end|>"));
  program->type("unsent\033[A\033[B\r");
  program->read_until("cached]");
  EXPECT_THAT(prompt_of(3), HasSubstr("user\nunsent<|im_end|>"));
  const auto other = chat({"--no-history"});
  other->type("\033[A?\r");
  other->read_until("cached]");
  EXPECT_THAT(prompt_of(4), HasSubstr("user\n?<|im_end|>"));
}

TEST_F(TerminalChat, ObeysCommands) {
  const auto program = chat({"--temperature", "0.5"});
  const auto say = [&](const std::string& line, const std::string& wanted) {
    program->type(line + "\r");
    program->read_until("\033[0m");  // behind the echo
    program->read_until(wanted);
  };
  say("/help", "/retry");
  say("/system Be brief.", "System prompt: Be brief.");
  say("/params seed 42", "seed               42");
  say("/params temprature 1", "did you mean temperature?");
  say("/params temperature hot", "'hot' is not a number");
  say("/params thinking off", "thinking           off");
  say("/params max_tokens 9", "max_tokens         9");
  say("/save x.json", "nothing to save");
  says("Answer one.");
  say("question", "Answer one.");
  const engine::GenerationRequest request = std::move(engine_.submitted().at(0));
  EXPECT_EQ(request.sampling.seed, 42u);
  EXPECT_EQ(request.sampling.temperature, 0.5F);
  EXPECT_EQ(request.max_tokens, 9);
  EXPECT_THAT(prompt_of(0), HasSubstr("Be brief."));
  EXPECT_THAT(prompt_of(0), HasSubstr("</think>")) << "thinking is off";
  const std::string json = (folder_.path() / "chat.json").string(), text = (folder_.path() / "chat.md").string();
  say("/save " + json, "Written to");
  say("/save " + text, "Written to");
  say("/save /no/such/folder/x", "/no/such/folder");
  const Result<Json> saved = read_json_file(json);
  ASSERT_OK(saved);
  EXPECT_EQ(saved->at("messages").size(), 3u);
  EXPECT_EQ(saved->at("messages")[2]["content"], "Answer one.");
  EXPECT_EQ(saved->at("seed"), 42);
  EXPECT_THAT(read_file(text).value(), HasSubstr("## You\n\nquestion\n"));
  says("Answer two.");
  say("/retry", "Answer two.");
  EXPECT_EQ(prompt_of(1), prompt_of(0));
  say("/params seed default", "seed               default");
  say("/new", "A new conversation.");
  say("//slash", "Answer two.");
  EXPECT_THAT(prompt_of(2), HasSubstr("user\n/slash<|im_end|>"));
  EXPECT_THAT(prompt_of(2), Not(HasSubstr("question")));
  say("/sytem x", "did you mean /system?");
  say("/system -", "no system prompt");
  program->type("/quit\r");
  EXPECT_EQ(program->wait(), 0);
}

TEST_F(TerminalChat, TextOfTheModelDoesNotCommandTheTerminal) {
  says(
      "\033]0;pwned\007\n</think>\n\n\033[2J\033[31mred\r\x9b"
      "1mx");
  const auto program = chat();
  program->type("hi\r");
  const std::string shown = program->read_until("cached]");
  EXPECT_THAT(shown, Not(HasSubstr("\033]")));
  EXPECT_THAT(shown, HasSubstr("␛[2J␛[31mred␍"));
  EXPECT_THAT(shown, Not(HasSubstr("\033[31m")));
}

TEST_F(TerminalChat, TellsWhatTheServerRefusesAndGoesOn) {
  const auto program = chat();
  program->type("/params max_tokens 100000\r");
  program->read_until("100000");
  program->type("hi\r");
  program->read_until("the server answers 400");
  program->type("/params max_tokens default\r");
  program->read_until("> ");
  program->type("hi again\r");
  program->read_until("Hello.");
  EXPECT_THAT(prompt_of(0), Not(HasSubstr("user\nhi<|im_end|>"))) << "a refused question is not part of the conversation";
}

TEST_F(TerminalChat, ATerminalThatUnderstandsNothingGetsPlainLines) {
  TerminalProgram program({"chat", "--base-url", url()}, {"TERM=dumb", environment()[0]});
  program.read_until("> ");
  program.type("What is up?\n");
  program.read_until("(thinking)");
  program.read_until("Hello.");
  program.read_until("> ");
  EXPECT_THAT(prompt_of(0), HasSubstr("user\nWhat is up?<|im_end|>"));
  program.type("\x04");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.all().find('\033'), std::string::npos);
}

TEST_F(TerminalChat, RestoresTheTerminalHoweverItEnds) {
  for (const int signal : {0, SIGTERM, SIGINT, SIGHUP}) {
    const auto program = chat();
    EXPECT_FALSE(program->echoes());
    program->type("abc");
    program->read_until("abc");
    if (signal == 0) {
      program->type("\x04\x15/quit\r");  // with text on the line Ctrl-D is no end
      EXPECT_EQ(program->wait(), 0);
    } else {
      program->send(signal);
      EXPECT_EQ(program->wait(), 128 + signal);
    }
    EXPECT_TRUE(program->echoes()) << signal;
  }
  const auto program = chat();
  engine_.hold();
  program->type("while an answer is awaited\r");
  program->read_until("\033[0m");
  program->send(SIGTERM);
  EXPECT_EQ(program->wait(), 128 + SIGTERM);
  EXPECT_TRUE(program->echoes());
  engine_.let_run();
}

TEST_F(TerminalChat, APipeIsOneQuestionAndTheAnswerAloneComesOut) {
  says("A thought.\n</think>\n\nHello\033 there.");
  const Piped piped = pipe(fmt::format("printf 'What\\nis up?\\n' | {} chat --base-url {}", QUERN_PROGRAM, url()));
  EXPECT_EQ(piped.exit_code, 0);
  EXPECT_EQ(piped.output, "Hello\033 there.\n") << "bytes as they are: nobody looks at a terminal";
  EXPECT_THAT(prompt_of(0), HasSubstr("user\nWhat\nis up?"));
  const Piped quick = pipe(fmt::format("{} chat --url {} --quick 'Say hello' < /dev/null", QUERN_PROGRAM, url()));
  EXPECT_EQ(quick.output, "Hello\033 there.\n");
  const Piped empty = pipe(fmt::format("{} chat --url {} < /dev/null", QUERN_PROGRAM, url()));
  EXPECT_EQ(empty.exit_code, 1);
  EXPECT_THAT(read_file(folder_.path() / "stderr").value(), HasSubstr("stdin is empty"));
}

TEST_F(TerminalChat, SaysWhatIsWrongWithTheServer) {
  const auto refused = [](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {"chat", "--quick", "hi"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const testing::ProgramResult result = run_quern(all);
    EXPECT_EQ(result.exit_code, 1);
    return result.log;
  };
  EXPECT_THAT(refused({"--base-url", "http://127.0.0.1:1"}), HasSubstr("quern serve MODEL"));
  EXPECT_THAT(refused({"--base-url", "https://127.0.0.1"}), HasSubstr("https is not supported"));
  EXPECT_THAT(refused({"--base-url", url(), "/tmp"}), HasSubstr("contradict"));
  EXPECT_THAT(refused({"--base-url", url(), "--model-name", "other"}), HasSubstr("does not exist"));
  EXPECT_THAT(refused({"/no/such/model"}), HasSubstr("/no/such/model"));
  engine_.set_writer([](const engine::GenerationRequest&) {
    server::Script script = server::say("</think>\n\nHalf");
    script.error_after_end = make_error(ErrorCode::kInternal, "the device is gone");
    return script;
  });
  EXPECT_THAT(refused({"--base-url", url()}), HasSubstr("the device is gone"));
}

TEST_F(TerminalChat, SendsTheKey) {
  server::ServerOptions options;
  options.api.api_keys = {"secret"};
  start(options);
  EXPECT_THAT(run_quern({"chat", "--url", url(), "--quick", "hi"}).log, HasSubstr("OPENAI_API_KEY"));
  EXPECT_EQ(run_quern({"chat", "--url", url(), "--quick", "hi", "--api-key", "secret"}).output, "Hello.\n");
  const auto program = std::make_unique<TerminalProgram>(std::vector<std::string>{"chat", "--url", url(), "--quick", "hi"},
                                                         std::vector<std::string>{"OPENAI_API_KEY=secret"});
  program->read_until("Hello.");
  EXPECT_EQ(program->wait(), 0);
}

TEST_F(TerminalChat, TalksThroughASocketFile) {
  server::ServerOptions options;
  options.http.unix_socket = (folder_.path() / "socket").string();
  start(options);
  EXPECT_EQ(run_quern({"chat", "--url", "http+unix:" + options.http.unix_socket, "--quick", "hi"}).output, "Hello.\n");
}

TEST_F(TerminalChat, WaitsForAServerThatLoadsAndShowsHowFarItIs) {
  start({}, false);
  server_->set_loading({.phase = "loading_weights", .fraction = 0.42});
  TerminalProgram program({"chat", "--url", url(), "--quick", "hi"}, environment());
  program.read_until("]   42 %");
  server_->set_ready(context_);
  program.read_until("Hello.");
  EXPECT_EQ(program.wait(), 0);
}

TEST(TerminalChatWithAModel, LoadsItAndAnswers) {
  const std::string model = std::string(QUERN_SOURCE_DIR) + "/models/quern-demo";
  const testing::ProgramResult result =
      run_quern({"chat", model, "--threads", "2", "--max-model-len", "2048", "--temperature", "0", "--quick", "What is 17 + 25?"});
  EXPECT_EQ(result.exit_code, 0) << result.log;
  EXPECT_EQ(result.output, "17 + 25 = 42\n");
  EXPECT_EQ(result.log, "") << "a log would stand between the lines";
}

}  // namespace
}  // namespace quern::app
