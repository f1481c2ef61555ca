#include "worker/sequence_memory.h"

namespace quern::worker {

Result<ops::TensorView> SequenceMemory::tensor(ops::Device& device, std::string_view purpose, DType dtype, const Shape& shape) {
  ASSIGN_OR_RETURN(auto buffer, device.allocate(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype), purpose));
  buffers_.push_back(std::move(buffer));
  return ops::TensorView{buffers_.back().get(), 0, dtype, shape};
}

Result<SequenceMemory> SequenceMemory::allocate(const ExecutionPlan& plan, const RankPlan& rank, const Sizes& sizes, ops::Device& device, ops::Stream& stream) {
  const model::ModelConfig& c = rank.config;
  const WorkerLimits& limits = plan.limits;
  const int64_t slots = limits.num_slots, snapshots = limits.num_snapshots;
  SequenceMemory m;
  m.window_columns_ = sizes.window_columns;
  ASSIGN_OR_RETURN(m.tables.cursor, m.tensor(device, "cursors", DType::kI32, {slots}));
  ASSIGN_OR_RETURN(m.tables.boundary, m.tensor(device, "boundaries", DType::kI32, {slots}));
  ASSIGN_OR_RETURN(m.tables.last_token, m.tensor(device, "last tokens", DType::kI32, {slots}));
  ASSIGN_OR_RETURN(m.tables.position_delta, m.tensor(device, "position deltas", DType::kI32, {slots}));
  ASSIGN_OR_RETURN(m.tables.drafts, m.tensor(device, "drafts", DType::kI32, {slots, std::max<int64_t>(limits.k_max, 1)}));
  ASSIGN_OR_RETURN(m.tables.block_tables, m.tensor(device, "block tables", DType::kI32, {slots, ceil_div(limits.max_model_len, ops::kGrid)}));
  if (rank.shard.last_stage()) {
    ASSIGN_OR_RETURN(m.sampler.params, m.tensor(device, "sampling parameters", DType::kU8, {slots, static_cast<int64_t>(sizeof(ops::SlotSampling))}));
    ASSIGN_OR_RETURN(m.sampler.counts, m.tensor(device, "token counts", DType::kI32, {slots, c.vocab_size}));
    ASSIGN_OR_RETURN(m.sampler.in_prompt, m.tensor(device, "prompt marks", DType::kU8, {slots, c.vocab_size}));
    ASSIGN_OR_RETURN(m.hidden_window, m.tensor(device, "hidden window", plan.activation, {slots, sizes.hidden_window, c.hidden_size}));
    ASSIGN_OR_RETURN(m.boundary_hidden, m.tensor(device, "boundary hidden", plan.activation, {slots, c.hidden_size}));
    if (snapshots > 0) {
      ASSIGN_OR_RETURN(m.snapshot_hidden_, m.tensor(device, "snapshots", plan.activation, {snapshots, c.hidden_size}));
    }
  }

  for (int64_t layer = 0; layer < sizes.num_linear_layers; ++layer) {
    ops::GdnStateView g;
    const int64_t nk = c.linear_num_key_heads, nv = c.linear_num_value_heads, dk = c.linear_key_head_dim, dv = c.linear_value_head_dim;
    ASSIGN_OR_RETURN(g.state, m.tensor(device, "recurrent state", DType::kF32, {slots, nv, dv, dk}));
    ASSIGN_OR_RETURN(g.ring_k, m.tensor(device, "ring", plan.ring, {slots, sizes.ring_rows, nk, dk}));
    ASSIGN_OR_RETURN(g.ring_u, m.tensor(device, "ring", plan.ring, {slots, sizes.ring_rows, nv, dv}));
    ASSIGN_OR_RETURN(g.ring_g, m.tensor(device, "ring", DType::kF32, {slots, sizes.ring_rows, nv}));
    ASSIGN_OR_RETURN(g.conv_window, m.tensor(device, "conv window", plan.activation, {slots, sizes.window_columns, sizes.channels}));
    ASSIGN_OR_RETURN(g.boundary_columns, m.tensor(device, "boundary columns", plan.activation, {slots, 3, sizes.channels}));
    m.gdn.push_back(g);
    if (snapshots > 0) {
      SnapshotLayer s;
      ASSIGN_OR_RETURN(s.state, m.tensor(device, "snapshots", DType::kF32, {snapshots, nv, dv, dk}));
      ASSIGN_OR_RETURN(s.boundary_columns, m.tensor(device, "snapshots", plan.activation, {snapshots, 3, sizes.channels}));
      m.snapshot_layers_.push_back(s);
    }
  }

  std::vector<int64_t> attention_layers;
  for (int64_t i = 0; i < c.num_layers(); ++i)
    if (c.layers[static_cast<size_t>(i)] == model::LayerType::kFullAttention) attention_layers.push_back(rank.shard.layers.begin + i);
  if (plan.with_mtp && rank.shard.last_stage()) attention_layers.push_back(-1);
  for (const int64_t layer : attention_layers) {
    ops::KvCacheView kv;
    const Shape shape{limits.num_blocks, c.num_key_value_heads, ops::kGrid, c.head_dim};
    ASSIGN_OR_RETURN(kv.k, m.tensor(device, "KV cache", plan.kv, shape));
    ASSIGN_OR_RETURN(kv.v, m.tensor(device, "KV cache", plan.kv, shape));
    if (plan.kv == DType::kE4M3) {
      const auto heads = static_cast<size_t>(c.num_key_value_heads);
      const auto scales = rank.inventory.kv_scales.find(layer);
      const auto widen = [&](const std::vector<float>& stored) {
        if (stored.empty()) return std::vector<float>(heads, 1.0f);
        return stored.size() == 1 ? std::vector<float>(heads, stored[0]) : stored;
      };
      const std::vector<float> k = widen(scales == rank.inventory.kv_scales.end() ? std::vector<float>{} : scales->second.k);
      const std::vector<float> v = widen(scales == rank.inventory.kv_scales.end() ? std::vector<float>{} : scales->second.v);
      ASSIGN_OR_RETURN(kv.k_scale, m.tensor(device, "KV scales", DType::kF32, {c.num_key_value_heads}));
      ASSIGN_OR_RETURN(kv.v_scale, m.tensor(device, "KV scales", DType::kF32, {c.num_key_value_heads}));
      stream.copy_to_device(k.data(), kv.k_scale);
      stream.copy_to_device(v.data(), kv.v_scale);
      RETURN_IF_ERROR(stream.finish());
    }
    m.kv.push_back(kv);
  }
  return m;
}

void SequenceMemory::clear(int32_t slot, std::vector<ops::StateCopy::Copy>& copies) const {
  for (const ops::TensorView& table : {tables.cursor, tables.boundary, tables.last_token, tables.position_delta, tables.drafts}) copies.push_back({{}, table.at(slot)});
  for (const ops::TensorView& table : {sampler.params, sampler.counts, sampler.in_prompt, hidden_window, boundary_hidden})
    if (!table.empty()) copies.push_back({{}, table.at(slot)});
  for (const ops::GdnStateView& g : gdn)
    for (const ops::TensorView& part : {g.state, g.conv_window, g.boundary_columns}) copies.push_back({{}, part.at(slot)});
}

void SequenceMemory::snapshot(int32_t slot, int32_t snapshot, std::vector<ops::StateCopy::Copy>& copies) const {
  for (size_t i = 0; i < gdn.size(); ++i) {
    copies.push_back({gdn[i].state.at(slot), snapshot_layers_[i].state.at(snapshot)});
    copies.push_back({gdn[i].boundary_columns.at(slot), snapshot_layers_[i].boundary_columns.at(snapshot)});
  }
  if (!snapshot_hidden_.empty()) copies.push_back({boundary_hidden.at(slot), snapshot_hidden_.at(snapshot)});
}

void SequenceMemory::fill_windows(int32_t slot, int32_t boundary, size_t layer, const ops::TensorView& columns, std::vector<ops::StateCopy::Copy>& copies) const {
  const ops::TensorView window = gdn[layer].conv_window.at(slot);
  for (int32_t i = 0; i < 3; ++i) copies.push_back({columns.at(i), window.at((boundary - 3 + i) % window_columns_)});
}

void SequenceMemory::fill_hidden(int32_t slot, int32_t boundary, const ops::TensorView& hidden, std::vector<ops::StateCopy::Copy>& copies) const {
  copies.push_back({hidden, hidden_window.at(slot).at((boundary - 1) % hidden_window.shape[1])});
}

void SequenceMemory::restore(int32_t slot, int32_t snapshot, int32_t boundary, std::vector<ops::StateCopy::Copy>& copies) const {
  for (size_t i = 0; i < gdn.size(); ++i) {
    const ops::TensorView columns = snapshot_layers_[i].boundary_columns.at(snapshot);
    copies.push_back({snapshot_layers_[i].state.at(snapshot), gdn[i].state.at(slot)});
    copies.push_back({columns, gdn[i].boundary_columns.at(slot)});
    fill_windows(slot, boundary, i, columns, copies);
  }
  if (snapshot_hidden_.empty()) return;
  copies.push_back({snapshot_hidden_.at(snapshot), boundary_hidden.at(slot)});
  fill_hidden(slot, boundary, snapshot_hidden_.at(snapshot), copies);
}

void SequenceMemory::rewind(int32_t slot, int32_t boundary, std::vector<ops::StateCopy::Copy>& copies) const {
  for (size_t i = 0; i < gdn.size(); ++i) fill_windows(slot, boundary, i, gdn[i].boundary_columns.at(slot), copies);
  if (!boundary_hidden.empty()) fill_hidden(slot, boundary, boundary_hidden.at(slot), copies);
}

std::vector<ops::TensorView> SequenceMemory::block_parts(int32_t block) const {
  std::vector<ops::TensorView> parts;
  for (const ops::KvCacheView& layer : kv) parts.insert(parts.end(), {layer.k.at(block), layer.v.at(block)});
  return parts;
}

std::vector<ops::TensorView> SequenceMemory::snapshot_parts(int32_t snapshot) const {
  std::vector<ops::TensorView> parts;
  if (!snapshot_hidden_.empty()) parts.push_back(snapshot_hidden_.at(snapshot));
  for (const SnapshotLayer& layer : snapshot_layers_) parts.insert(parts.end(), {layer.state.at(snapshot), layer.boundary_columns.at(snapshot)});
  return parts;
}

void SequenceMemory::clear_mtp_row(int32_t block, std::vector<ops::StateCopy::Copy>& copies) const {
  for (const ops::TensorView& part : {kv.back().k, kv.back().v})
    for (int64_t head = 0; head < part.shape[1]; ++head) copies.push_back({{}, part.at(block).at(head).at(0)});
}

}  // namespace quern::worker
