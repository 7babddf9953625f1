//! `tegula template`: renders messages as the model's prompt.

use crate::args::TemplateArgs;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::Read;
use tegula::{ChatInput, ChatTemplate, ModelFile, TemplateOrigin};

pub(crate) fn run(args: &TemplateArgs) -> Result<()> {
    let name = args.messages.display().to_string();
    let text = if name == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(&args.messages)
    };
    let value: Value = serde_json::from_str(&text.with_context(|| name.clone())?)
        .with_context(|| format!("{name} is no JSON"))?;
    let file = ModelFile::open(crate::models::find(&args.model)?)?;
    let template = template_of(&file)?;
    let rendered = match &value {
        Value::Array(_) => {
            template.render(&super::run::chat_input(&value, !args.no_generation_prompt))?
        }
        Value::Object(fields) => {
            let Some(messages) = fields.get("messages") else {
                bail!("{name}: an object needs `messages`, an array of {{role, content}}");
            };
            let mut extra = fields.clone();
            let tools = extra.remove("tools").filter(|tools| !tools.is_null());
            extra.remove("messages");
            let asked = extra.remove("add_generation_prompt").and_then(|flag| flag.as_bool());
            let add_generation_prompt = asked.unwrap_or(!args.no_generation_prompt);
            let input = super::run::chat_input(messages, add_generation_prompt);
            template.render(&ChatInput { tools: tools.as_ref(), extra: Some(&extra), ..input })?
        }
        _ => bail!("{name}: neither an array of messages nor an object with `messages`"),
    };
    Ok(crate::output::stream(&rendered)?)
}

/// The model's template; says on stderr when it is one of ours and not the file's.
pub(crate) fn template_of(file: &ModelFile) -> Result<ChatTemplate> {
    let Some(template) = file.chat_template()? else {
        bail!(
            "{}: this model has no chat template; it may be a base model, which continues text (tegula run)",
            file.path().display()
        );
    };
    if let TemplateOrigin::BuiltIn(format) = template.origin() {
        eprintln!("note: the file has no chat template; the built-in `{format}` format is used");
    }
    Ok(template)
}

/// Renders messages with the model's template.
pub(crate) fn render(
    file: &ModelFile,
    messages: &Value,
    generation_prompt: bool,
) -> Result<String> {
    Ok(template_of(file)?.render(&super::run::chat_input(messages, generation_prompt))?)
}
