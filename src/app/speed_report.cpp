#include "app/speed_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "app/format.h"
#include "app/published_speeds.h"

namespace quern::app {
namespace {

using worker::CardSpeed;
using worker::StepTerms;

/// Lengths of an accepted chain that were published for this model family with 3 drafts: thinking, and code without thinking.
constexpr std::pair<double, const char*> kAcceptance[] = {{2.5, "thinking"}, {3.3, "code"}};
/// Small all-reduces of other programs on two cards: with PCIe 5 and with PCIe 4.
constexpr double kFastAllReduce = 13e-6, kSlowAllReduce = 48e-6;
constexpr const char* kMark = "modelled";

double ms(double seconds) { return seconds * 1e3; }

/// The plan's speed with another all-reduce.
CardSpeed with_all_reduce(const worker::ExecutionPlan& plan, const CardSpeed& speed, double seconds) {
  worker::SpeedAssumptions assumed = speed.assumed;
  assumed.all_reduce_seconds = seconds;
  return worker::card_speed(plan, assumed).value_or(speed);
}

void print_terms(const CardSpeed::Stage& stage, const worker::SpeedAssumptions& assumed, std::string& text) {
  const worker::RankWork& work = stage.work;
  const StepTerms& terms = stage.terms;
  const auto row = [&](std::string_view what, double seconds, const std::string& how, bool counts = true) {
    text += fmt::format("  {:<24}{:>9.3f} ms{}  {}\n", what, ms(seconds), counts ? " " : "*", how);
  };
  const auto pair = [&](std::string_view what, double read, double issue, double bytes, const std::string& issued) {
    row(what, read, fmt::format("{:.2f} GB at {} of {:.0f} GB/s", bytes / 1e9, assumed.read_share, stage.card.read_bandwidth / 1e9), read >= issue);
    row("", issue, issued, issue > read);
  };
  pair("linear layers", terms.weight_read, terms.weight_issue, work.weight_bytes, fmt::format("{:.2f} G instructions at {:.0f} G/s", work.weight_slots / 1e9, stage.card.issue_rate / 1e9));
  pair("states, rings, keys", terms.mixer_read, terms.mixer_issue, work.mixer_bytes,
       fmt::format("{:.3f} G instructions of GDN and {:.3f} G of attention at {} of {:.0f} G/s, where they occupy all engines", (work.gdn_slots + work.gdn_walk_slots) / 1e9, work.attention_slots / 1e9,
                   assumed.mixer_share, stage.card.issue_rate / 1e9));
  row("launches", terms.launches, fmt::format("{} of {:.0f} us", work.launches, assumed.launch_seconds * 1e6));
  if (work.all_reduces > 0)
    row("all-reduces", terms.all_reduces, fmt::format("{} of {:.0f} us, or {:.1f} KiB at {:.0f} GB/s", work.all_reduces, assumed.all_reduce_seconds * 1e6, work.all_reduce_bytes / 1024,
                                                      assumed.exchange_bytes_per_second / 1e9));
  if (work.gather_bytes > 0) row("candidates of other ranks", terms.gather, format_bytes(static_cast<uint64_t>(work.gather_bytes)));
  if (work.hand_over_bytes > 0) row("hand-over", terms.hand_over, fmt::format("{:.1f} KiB to the next stage", work.hand_over_bytes / 1024));
}

std::vector<PublishedSpeed> published_for(const worker::ExecutionPlan& plan) {
  std::vector<PublishedSpeed> found;
  if (!has_published_shapes(plan.config)) return found;
  const int num_cards = plan.options.tp_size * plan.options.pp_size;
  for (const PublishedSpeed& published : published_speeds()) {
    std::string name = plan.traits.name;  // "Intel Arc Pro B60"
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (name.ends_with(published.card) && published.num_cards == num_cards) found.push_back(published);
  }
  return found;
}

Json terms_as_json(const StepTerms& t) {
  return {{"weight_read_seconds", t.weight_read}, {"weight_issue_seconds", t.weight_issue}, {"mixer_read_seconds", t.mixer_read}, {"mixer_issue_seconds", t.mixer_issue},
          {"launch_seconds", t.launches},         {"all_reduce_seconds", t.all_reduces},    {"gather_seconds", t.gather},         {"hand_over_seconds", t.hand_over},
          {"seconds", t.seconds()}};
}
Json work_as_json(const worker::RankWork& w) {
  return {{"weight_bytes", w.weight_bytes}, {"weight_instructions", w.weight_slots}, {"mixer_bytes", w.mixer_bytes},
          {"attention_products", w.attention_products}, {"attention_instructions", w.attention_slots}, {"gdn_instructions", w.gdn_slots + w.gdn_walk_slots}, {"launches", w.launches},
          {"all_reduces", w.all_reduces}, {"all_reduce_bytes", w.all_reduce_bytes}, {"gather_bytes", w.gather_bytes}, {"hand_over_bytes", w.hand_over_bytes}};
}

std::string layout_name(const worker::ExecutionPlan& plan) { return fmt::format("-tp {} -pp {}", plan.options.tp_size, plan.options.pp_size); }

/// Of one sequence: modelled, or expected from what was measured on such a device; 0: it does not fit, or nothing is known.
double decode_speed(const Layout& layout) { return layout.plan.fits ? layout.plan.expected_decode_tokens_per_second : 0; }
double decode_speed_16(const Layout& layout) { return layout.plan.fits && layout.speed ? layout.speed->tokens_per_second_16() : 0; }

void sort(std::vector<Layout>& layouts) {
  std::stable_sort(layouts.begin(), layouts.end(), [](const Layout& a, const Layout& b) { return decode_speed(a) > decode_speed(b); });
}

}  // namespace

std::string card_speed_as_text(const worker::ExecutionPlan& plan, const CardSpeed& speed) {
  std::string text = fmt::format("{}: nothing of this was measured on a card. One token of one sequence at 1k context:\n", kMark);
  for (size_t i = 0; i < speed.stages.size(); ++i) {
    if (speed.stages.size() > 1) text += fmt::format("  stage {} of {}: {:.3f} ms\n", i + 1, speed.stages.size(), ms(speed.stages[i].terms.seconds()));
    print_terms(speed.stages[i], speed.assumed, text);
  }
  text += "  (* runs beside the longer of the two; instructions are those of the kernels' machine code)\n";
  text += fmt::format("  {:<24}{:>9.3f} ms   {:.1f} tok/s {}\n", "one token", ms(speed.decode_seconds), speed.tokens_per_second(), kMark);
  if (plan.options.tp_size > 1)
    text += fmt::format("  {:<24}{:>12}   {:.1f} and {:.1f} tok/s {}\n", "", "", with_all_reduce(plan, speed, kFastAllReduce).tokens_per_second(), with_all_reduce(plan, speed, kSlowAllReduce).tokens_per_second(),
                        fmt::format("with all-reduces of {:.0f} and {:.0f} us, {}", kFastAllReduce * 1e6, kSlowAllReduce * 1e6, kMark));
  text += fmt::format("  {:<24}{:>9.3f} ms   {:.0f} tok/s together, {}\n", "16 sequences", ms(speed.decode_seconds_16), speed.tokens_per_second_16(), kMark);
  text += fmt::format("  {:<24}{:>9.3f} ms   {:.0f} tok/s {}, at {} of the matrix units' peak\n", "a prompt of 512", ms(speed.prompt_seconds), 512 / speed.prompt_seconds, kMark, speed.assumed.prompt_share);
  text += fmt::format("  {:<24}{:>9.3f} ms   {:.0f} tok/s {}: to its first token, in steps of up to {} rows\n", "a prompt of 8192", ms(speed.long_prompt_seconds), 8192 / speed.long_prompt_seconds, kMark,
                      plan.limits.max_rows);
  text += fmt::format("  {:<24}{:>12}   {:.1f} tok/s over the whole request, {}\n", "512 in, 256 out", "", speed.latency_tokens_per_second(), kMark);
  if (speed.draft_seconds > 0)
    for (const auto& [length, of] : kAcceptance)
      text += fmt::format("  {:<24}{:>12}   {:.1f} tok/s where a verify gives {} tokens ({}), {}\n", "MTP, 3 drafts", "", speed.tokens_per_second_mtp(3, length), length, of, kMark);
  for (const PublishedSpeed& published : published_for(plan))
    text += fmt::format("  published, measured     {:>9.1f} tok/s  {} ({})\n", published.tokens_per_second, published.what, published.source);
  return text;
}

Json card_speed_as_json(const worker::ExecutionPlan& plan, const CardSpeed& speed) {
  const worker::SpeedAssumptions& a = speed.assumed;
  Json stages = Json::array(), mtp = Json::array(), published = Json::array(), other = Json::array();
  for (const CardSpeed::Stage& stage : speed.stages)
    stages.push_back({{"read_bandwidth_bytes_per_second", stage.card.read_bandwidth}, {"instructions_per_second", stage.card.issue_rate}, {"work", work_as_json(stage.work)}, {"terms", terms_as_json(stage.terms)}});
  if (speed.draft_seconds > 0)
    for (int drafts = 1; drafts <= 4; ++drafts)
      mtp.push_back({{"drafts", drafts}, {"verify_seconds", speed.verify_seconds[drafts - 1]}, {"draft_seconds", speed.draft_seconds}});
  for (const double seconds : {kFastAllReduce, kSlowAllReduce})
    if (plan.options.tp_size > 1) other.push_back({{"all_reduce_seconds", seconds}, {"decode_tokens_per_second", with_all_reduce(plan, speed, seconds).tokens_per_second()}});
  for (const PublishedSpeed& p : published_for(plan)) published.push_back({{"tokens_per_second", p.tokens_per_second}, {"what", p.what}, {"source", p.source}});
  return {{"modelled", true},
          {"assumptions",
           {{"read_share", a.read_share},
            {"prompt_share", a.prompt_share},
            {"mixer_share", a.mixer_share},
            {"launch_seconds", a.launch_seconds},
            {"all_reduce_seconds", a.all_reduce_seconds},
            {"exchange_bytes_per_second", a.exchange_bytes_per_second}}},
          {"stages", stages},
          {"decode_seconds", speed.decode_seconds},
          {"decode_tokens_per_second", speed.tokens_per_second()},
          {"other_all_reduces", other},
          {"decode_tokens_per_second_16", speed.tokens_per_second_16()},
          {"prompt_seconds_512", speed.prompt_seconds},
          {"prompt_seconds_8192", speed.long_prompt_seconds},
          {"latency_tokens_per_second_512_256", speed.latency_tokens_per_second()},
          {"mtp", mtp},
          {"published", published}};
}

std::string layouts_as_text(std::vector<Layout> layouts) {
  sort(layouts);
  const bool modelled = std::any_of(layouts.begin(), layouts.end(), [](const Layout& l) { return l.speed.has_value(); });
  std::string text = fmt::format("{:<16}{:>14}{:>16}{:>18}{:>20}   {}\n", "layout", "1 sequence", "16 sequences", "512-token prompt", "weights of a rank", modelled ? kMark : "");
  const auto speed = [](double tokens_per_second, int digits) { return tokens_per_second > 0 ? fmt::format("{:.{}f} tok/s", tokens_per_second, digits) : std::string("-"); };
  for (const Layout& l : layouts)
    text += fmt::format("{:<16}{:>14}{:>16}{:>18}{:>20}   {}\n", layout_name(l.plan), speed(decode_speed(l), 1), speed(decode_speed_16(l), 0),
                        l.plan.fits && l.speed ? fmt::format("{:.0f} ms", ms(l.speed->prompt_seconds)) : "-", l.plan.memory.weights_bytes > 0 ? format_bytes(l.plan.memory.weights_bytes) : "-",
                        l.plan.fits ? "" : l.plan.verdict);
  const Layout& many = *std::max_element(layouts.begin(), layouts.end(), [](const Layout& a, const Layout& b) { return decode_speed_16(a) < decode_speed_16(b); });
  if (decode_speed(layouts.front()) > 0) text += fmt::format("fastest for one sequence: {}", layout_name(layouts.front().plan));
  if (decode_speed_16(many) > 0) text += fmt::format("; for 16 together: {}", layout_name(many.plan));
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

Json layouts_as_json(std::vector<Layout> layouts) {
  sort(layouts);
  Json list = Json::array();
  for (const Layout& l : layouts) {
    Json entry{{"tp", l.plan.options.tp_size}, {"pp", l.plan.options.pp_size}, {"fits", l.plan.fits}, {"verdict", l.plan.verdict}, {"weights_bytes", l.plan.memory.weights_bytes}, {"expected_decode_tokens_per_second", decode_speed(l)}};
    if (l.speed) entry["speed"] = card_speed_as_json(l.plan, *l.speed);
    list.push_back(std::move(entry));
  }
  return list;
}

}  // namespace quern::app
