#include "backends/cuda/device_code.h"
#include "backends/cuda/embed_args.h"
#include "backends/cuda/plain.h"

namespace quern::cuda::plain {

namespace {

class EmbedKernel final : public ops::Embed::Kernel {
 public:
  EmbedKernel(const ops::Embed::Problem& problem, Function<ResolveArgs> resolve, Function<LookupArgs> lookup, bool overlap)
      : problem_(problem),
        table_({problem.vocab_size, problem.hidden, problem.scheme}, 0),
        resolve_(resolve),
        lookup_(lookup),
        overlap_(overlap) {}

  [[nodiscard]] std::string_view arithmetic() const override { return arithmetic_id(problem_.activation); }
  [[nodiscard]] size_t packed_bytes() const override { return table_.end_bytes(); }
  [[nodiscard]] std::string_view table_layout() const override { return kRowsLayout; }
  void pack(const ops::LinearSource& table, ops::Buffer& packed, ops::Stream& stream) const override { table_.pack(table, packed, stream); }

  void enqueue(const ops::Rows& rows, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    if (rows.num_rows == 0) return;
    constexpr unsigned kThreads = 128;
    cuda_stream(launch.stream)
        .launch(resolve_, {.grid = {blocks_for(rows.num_rows, kThreads)}, .block = {kThreads}, .programmatic = overlap_},
                ResolveArgs{step_tables(rows)});
    enqueue_lookup(rows.tokens.first(rows.num_rows), packed, x, launch);
  }

  void enqueue_lookup(const ops::TensorView& tokens, const ops::Buffer& packed, const ops::TensorView& x, ops::Launch& launch) const override {
    if (tokens.empty()) return;
    const LookupArgs args{table_.view(packed), problem_.first_id, problem_.end_of_ids(), x.dtype, tokens.data<int32_t>(), x.data<void>()};
    constexpr unsigned kThreads = 256;
    cuda_stream(launch.stream)
        .launch(lookup_,
                {.grid = {static_cast<unsigned>(tokens.shape[0]), blocks_for(problem_.hidden, kThreads)},
                 .block = {kThreads},
                 .programmatic = overlap_},
                args);
  }

 private:
  ops::Embed::Problem problem_;
  PackedLinear table_;
  Function<ResolveArgs> resolve_;
  Function<LookupArgs> lookup_;
  bool overlap_;
};

}  // namespace

ops::Verdict accepts(const ops::Embed::Problem& problem, const ops::DeviceTraits& traits) { return accepts_activation(traits, problem.activation); }

Result<std::unique_ptr<ops::Embed::Kernel>> make(const ops::Embed::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const auto resolve, cuda_device(device).function<ResolveArgs>("embed", "resolve_rows"));
  ASSIGN_OR_RETURN(const auto lookup, cuda_device(device).function<LookupArgs>("embed", "lookup_rows"));
  return std::unique_ptr<ops::Embed::Kernel>(
      std::make_unique<EmbedKernel>(problem, resolve, lookup, runs_code_for("90a", device.traits().architecture)));
}

}  // namespace quern::cuda::plain
