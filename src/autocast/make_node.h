// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/node_ptr.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>

namespace fastamp::autocast {

namespace detail {

// Templates, since only one of the two compiles.
template <class Made, class Node, class... Arguments>
std::shared_ptr<Node> make_node_held_by(const std::shared_ptr<Node>* /*held_by*/,
                                        Arguments&&... arguments) {
  // Overloaded on how nodes are held: deleteNode does not exist where they count their references.
  return std::shared_ptr<Node>(new Made(std::forward<Arguments>(arguments)...),
                               [](auto* node) { deleteNode(node); });
}

template <class Made, class Node, class... Arguments>
c10::intrusive_ptr<Node> make_node_held_by(const c10::intrusive_ptr<Node>* /*held_by*/,
                                           Arguments&&... arguments) {
  return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
}

}  // namespace detail

/// An autograd node of a class of fastamp, held as this torch holds nodes.
template <class Made, class... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  return detail::make_node_held_by<Made>(static_cast<const NodePtr*>(nullptr),
                                         std::forward<Arguments>(arguments)...);
}

/// Notifies hooks on the creation of nodes (torch.autograd.graph.node_creation_hook, torch 2.14)
/// of a node that is complete, as torch does for its own. May run code of users.
template <class NodePointer>
void announce_node(const NodePointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) {  // of torch's namespace
    fire_node_creation_hooks(node);
  }
}

}  // namespace fastamp::autocast
