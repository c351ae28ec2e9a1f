//! What the engine remembers of sequences it has seen: a radix tree over their tokens, for one version of the weights,
//! with the state of the model after some prefixes. A request that begins alike goes on from there.
//!
//! A state is a [`KvCache`], all kinds of it at one token, and shares its pages with the sequence it was kept from; what a
//! tree costs is counted in the pages that only it holds. With every token its expert choices and indexer selections are
//! kept, so that a rollout's record is complete however it began. The least recently used state goes first.

use std::collections::{BTreeMap, HashMap};

use crate::kv_cache::KvCache;

/// The expert choices and indexer selections of some tokens, in a fixed number of values a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choices {
    /// T.
    pub num_tokens: usize,
    /// `[T, layers, K]`.
    pub expert_idx: Vec<u16>,
    /// `[T, CSA layers, index_topk]`.
    pub block_idx: Vec<u32>,
}

impl Choices {
    /// Those of tokens `from..to`.
    fn slice(&self, from: usize, to: usize) -> Self {
        let part = |len: usize| {
            let width = len / self.num_tokens.max(1);
            from * width..to * width
        };
        Self {
            num_tokens: to - from,
            expert_idx: self.expert_idx[part(self.expert_idx.len())].to_vec(),
            block_idx: self.block_idx[part(self.block_idx.len())].to_vec(),
        }
    }

    /// Adds those of the tokens that follow.
    pub fn extend(&mut self, other: &Self) {
        self.num_tokens += other.num_tokens;
        self.expert_idx.extend_from_slice(&other.expert_idx);
        self.block_idx.extend_from_slice(&other.block_idx);
    }
}

/// A state to go on from.
#[derive(Debug)]
pub struct Prefix {
    /// The state after `cache.len` tokens.
    pub cache: KvCache,
    /// What those tokens chose.
    pub choices: Choices,
}

/// The tree.
#[derive(Debug)]
pub struct PrefixCache {
    version: u64,
    /// Node 0 is the root; freed places are used again.
    nodes: Vec<Node>,
    free: Vec<usize>,
    /// The nodes with a state, by when it was used last.
    by_use: BTreeMap<u64, usize>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Node {
    parent: usize,
    /// By their first token.
    children: HashMap<u32, usize>,
    /// Those between the parent and here.
    tokens: Vec<u32>,
    choices: Choices,
    /// The state after the node's last token, and when it was used.
    state: Option<(KvCache, u64)>,
}

fn common_len(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl PrefixCache {
    /// An empty tree for weights of this version.
    pub fn new(version: u64) -> Self {
        Self { version, nodes: vec![Node::default()], free: Vec::new(), by_use: BTreeMap::new(), clock: 0 }
    }

    /// The version of the weights that its states were made with.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// How many states it holds.
    pub fn len(&self) -> usize {
        self.by_use.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.by_use.is_empty()
    }

    /// Forgets everything and goes over to another version of the weights.
    pub fn clear(&mut self, version: u64) {
        *self = Self { clock: self.clock, ..Self::new(version) };
    }

    /// The state after the longest prefix of `tokens` that is shorter than all of them: the last one has to go through
    /// the model for its logits.
    pub fn longest(&mut self, tokens: &[u32]) -> Option<Prefix> {
        let most = tokens.len().saturating_sub(1);
        let (mut at, mut depth, mut best) = (0, 0, None);
        while let Some(&child) = tokens.get(depth).and_then(|token| self.nodes[at].children.get(token)) {
            let edge = &self.nodes[child].tokens;
            if common_len(edge, &tokens[depth..]) < edge.len() {
                break;
            }
            (at, depth) = (child, depth + edge.len());
            if depth <= most && self.nodes[at].state.is_some() {
                best = Some(at);
            }
        }
        let best = best?;
        self.touch(best);
        let mut path = vec![best];
        while let Some(&last) = path.last().filter(|&&last| last != 0) {
            path.push(self.nodes[last].parent);
        }
        let mut choices = Choices::default();
        path.iter().rev().for_each(|&node| choices.extend(&self.nodes[node].choices));
        let (cache, _) = self.nodes[best].state.as_ref().expect("only such were looked at");
        Some(Prefix { cache: cache.clone(), choices })
    }

    /// Keeps the state `cache` after its `cache.len` first tokens of `tokens`, whose choices come first in `choices`.
    ///
    /// # Panics
    /// When the tokens are too few, or none.
    pub fn insert(&mut self, tokens: &[u32], choices: &Choices, cache: &KvCache) {
        let len = cache.len;
        assert!((1..=tokens.len()).contains(&len), "a state after {len} of {} tokens", tokens.len());
        let tokens = &tokens[..len];
        let (mut at, mut depth) = (0, 0);
        while depth < len {
            let Some(&child) = self.nodes[at].children.get(&tokens[depth]) else {
                let choices = choices.slice(depth, len);
                let node = Node { parent: at, tokens: tokens[depth..].to_vec(), choices, ..Node::default() };
                let child = self.add(node);
                self.nodes[at].children.insert(tokens[depth], child);
                (at, depth) = (child, len);
                continue;
            };
            let common = common_len(&self.nodes[child].tokens, &tokens[depth..]);
            at = if common < self.nodes[child].tokens.len() { self.split(child, common) } else { child };
            depth += common;
        }
        match &mut self.nodes[at].state {
            // The same tokens under the same weights: the same state.
            Some(_) => self.touch(at),
            None => {
                self.clock += 1;
                self.nodes[at].state = Some((cache.clone(), self.clock));
                self.by_use.insert(self.clock, at);
            }
        }
    }

    /// Forgets the least recently used state; false when there is none.
    pub fn evict(&mut self) -> bool {
        let Some((_, node)) = self.by_use.pop_first() else { return false };
        self.nodes[node].state = None;
        self.prune(node);
        true
    }

    fn touch(&mut self, node: usize) {
        self.clock += 1;
        if let Some((_, used)) = &mut self.nodes[node].state {
            self.by_use.remove(used);
            *used = self.clock;
            self.by_use.insert(self.clock, node);
        }
    }

    fn add(&mut self, node: Node) -> usize {
        match self.free.pop() {
            Some(at) => {
                self.nodes[at] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    /// Puts a node into the edge to `child` after `len` of its tokens.
    fn split(&mut self, child: usize, len: usize) -> usize {
        let Node { parent, tokens, choices, .. } = &self.nodes[child];
        let (parent, num) = (*parent, tokens.len());
        let (head, tail) = (tokens[..len].to_vec(), tokens[len..].to_vec());
        let (head_choices, tail_choices) = (choices.slice(0, len), choices.slice(len, num));
        let (first, next) = (head[0], tail[0]);
        let children = HashMap::from([(next, child)]);
        let middle = self.add(Node { parent, children, tokens: head, choices: head_choices, state: None });
        let child = &mut self.nodes[child];
        (child.parent, child.tokens, child.choices) = (middle, tail, tail_choices);
        self.nodes[parent].children.insert(first, middle);
        middle
    }

    /// Removes `node` and those above it that lead nowhere; one that leads to a single child becomes part of its edge.
    fn prune(&mut self, mut node: usize) {
        while node != 0 && self.nodes[node].state.is_none() {
            let parent = self.nodes[node].parent;
            let mut children = self.nodes[node].children.values();
            match (children.next(), children.next()) {
                (None, _) => {
                    let first = self.nodes[node].tokens[0];
                    self.nodes[parent].children.remove(&first);
                    self.nodes[node] = Node::default();
                    self.free.push(node);
                    node = parent;
                }
                (Some(&child), None) => {
                    let Node { mut tokens, mut choices, .. } = std::mem::take(&mut self.nodes[node]);
                    self.nodes[parent].children.insert(tokens[0], child);
                    let child = &mut self.nodes[child];
                    tokens.append(&mut child.tokens);
                    choices.extend(&child.choices);
                    (child.parent, child.tokens, child.choices) = (parent, tokens, choices);
                    self.free.push(node);
                    return;
                }
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use proptest::prelude::*;

    fn config() -> ModelConfig {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../recipes/quickstart_base/config.json");
        ModelConfig::load(&path).expect("a configuration")
    }

    /// A state of that many tokens; which ones, only the test knows.
    fn state(config: &ModelConfig, len: usize) -> KvCache {
        let mut cache = KvCache::new(config);
        cache.len = len;
        cache
    }

    fn choices(tokens: &[u32]) -> Choices {
        Choices {
            num_tokens: tokens.len(),
            expert_idx: tokens.iter().flat_map(|&t| [t as u16, 7]).collect(),
            block_idx: tokens.iter().flat_map(|&t| [t, t, 9]).collect(),
        }
    }

    proptest! {
        /// Against a plain list of all prefixes that were kept, in the order of their use.
        #[test]
        fn the_longest_kept_prefix_is_found_with_its_choices(
            steps in prop::collection::vec((0u8..5, prop::collection::vec(0u32..3, 1..12), 1usize..12), 1..120),
        ) {
            let config = config();
            let mut tree = PrefixCache::new(4);
            let mut kept: Vec<Vec<u32>> = Vec::new();
            for (what, tokens, len) in steps {
                match what {
                    0 | 1 => {
                        let len = len.min(tokens.len());
                        tree.insert(&tokens, &choices(&tokens), &state(&config, len));
                        kept.retain(|prefix| prefix[..] != tokens[..len]);
                        kept.push(tokens[..len].to_vec());
                    }
                    2 | 3 => {
                        let want = kept
                            .iter()
                            .enumerate()
                            .filter(|(_, prefix)| prefix.len() < tokens.len() && tokens.starts_with(prefix))
                            .max_by_key(|(_, prefix)| prefix.len())
                            .map(|(at, _)| at);
                        let got = tree.longest(&tokens);
                        prop_assert_eq!(got.as_ref().map(|p| p.cache.len), want.map(|at| kept[at].len()));
                        if let (Some(at), Some(got)) = (want, got) {
                            prop_assert_eq!(got.choices, choices(&kept[at]));
                            let used = kept.remove(at);
                            kept.push(used);
                        }
                    }
                    _ => {
                        prop_assert_eq!(tree.evict(), !kept.is_empty());
                        if !kept.is_empty() {
                            kept.remove(0);
                        }
                    }
                }
                prop_assert_eq!(tree.len(), kept.len());
                // Nodes without a state are where paths part, and nothing else.
                let in_use = tree.nodes.len() - tree.free.len() - 1;
                prop_assert!(in_use <= 2 * kept.len(), "{} nodes for {} states", in_use, kept.len());
            }
            while tree.evict() {}
            prop_assert_eq!(tree.nodes.len() - tree.free.len(), 1);
        }
    }
}
