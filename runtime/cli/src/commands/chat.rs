//! `tegula chat`: a conversation in the terminal.
//!
//! The model's own template is rendered anew for every turn, and only what is new against the tokens already evaluated is computed: templates
//! that rewrite earlier turns (dropping reasoning, say) stay right, the others stay fast.

use super::template::template_of;
use crate::args::ChatArgs;
use crate::output::{self, CANCEL};
use anyhow::Result;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use tegula::{
    ChatTemplate, GenerateOptions, Generation, Model, Sampler, Sequence, StopReason, generate,
};

pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    let sampling = args.sample.options();
    let seed = args.sample.drawn_seed(&sampling);
    let mut sampler = Sampler::new(sampling)?;
    let (model, load) = output::load(&args.load, 1)?;
    let template = template_of(model.file())?;
    output::catch_ctrl_c()?;
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        eprintln!(
            "{} on {}, context {} tokens. Ctrl-C stops an answer, Ctrl-D ends the chat.",
            model.info().name.as_deref().unwrap_or("model"),
            model.plan().device_names(),
            model.plan().context.n_ctx
        );
    }
    let mut chat = Chat { model: &model, template, messages: Vec::new(), evaluated: Vec::new() };
    if let Some(system) = &args.system {
        chat.messages.push(json!({"role": "system", "content": system}));
    }
    let mut sequence = model.sequence();
    let mut input = Input::new(terminal)?;
    while let Some(line) = input.next()? {
        if line.trim().is_empty() {
            continue;
        }
        CANCEL.store(false, Ordering::SeqCst);
        chat.messages.push(json!({"role": "user", "content": line}));
        let options = GenerateOptions { n_predict: args.sample.n_predict, ..Default::default() };
        let generation = chat.answer(&mut sequence, &mut sampler, options)?;
        output::stream("\n")?;
        if generation.stop == StopReason::ContextFull {
            eprintln!(
                "the context of {} tokens is full; start with a larger -c",
                model.plan().context.n_ctx
            );
            break;
        }
        if !terminal {
            output::print_timings(load, &generation, seed);
        }
    }
    Ok(())
}

struct Chat<'a> {
    model: &'a Model,
    template: ChatTemplate,
    messages: Vec<Value>,
    /// The tokens whose keys and values the sequence holds.
    evaluated: Vec<u32>,
}

impl Chat<'_> {
    fn answer(
        &mut self,
        sequence: &mut Sequence,
        sampler: &mut Sampler,
        options: GenerateOptions,
    ) -> Result<Generation> {
        let messages = Value::Array(self.messages.clone());
        let prompt = self.template.render(&super::run::chat_input(&messages, true))?;
        let tokens = self.model.tokenizer().encode_prompt(&prompt);
        let same = self.evaluated.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        // At least one token must be evaluated to have logits to choose from.
        let same = same.min(tokens.len().saturating_sub(1));
        sequence.truncate(u32::try_from(same).unwrap_or(u32::MAX));
        // A model that cannot go back forgets all.
        let same = same.min(sequence.n_past() as usize);
        self.evaluated.truncate(same);
        let new = tokens.get(same..).unwrap_or(&[]);
        let mut written = Ok(());
        let generation = generate(sequence, new, sampler, options, &CANCEL, |text| {
            if written.is_ok() {
                written = output::stream(text);
            }
        })?;
        written?;
        self.evaluated.extend_from_slice(new);
        let kept = generation.tokens.len().min(generation.n_decoded as usize);
        self.evaluated.extend(generation.tokens.iter().take(kept));
        self.evaluated.truncate(sequence.n_past() as usize);
        self.messages.push(json!({"role": "assistant", "content": generation.text}));
        Ok(generation)
    }
}

/// Lines from an editor on a terminal, plain lines elsewhere.
enum Input {
    Editor(Box<rustyline::DefaultEditor>),
    Lines(std::io::Lines<std::io::StdinLock<'static>>),
}

impl Input {
    fn new(terminal: bool) -> Result<Self> {
        if terminal {
            return Ok(Self::Editor(Box::new(rustyline::DefaultEditor::new()?)));
        }
        Ok(Self::Lines(std::io::stdin().lines()))
    }

    fn next(&mut self) -> Result<Option<String>> {
        match self {
            Self::Lines(lines) => Ok(lines.next().transpose()?),
            Self::Editor(editor) => match editor.readline("> ") {
                Ok(line) => {
                    editor.add_history_entry(&line)?;
                    Ok(Some(line))
                }
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(None),
                Err(error) => Err(error.into()),
            },
        }
    }
}
