//! Other forms of the same messages, for templates that cannot take the first.
//!
//! Each function gives the messages in another form, or `None` if that would
//! be the same one.

use serde_json::Value;

/// Content that is nothing but text parts, as one text.
pub(super) fn join_text_parts(messages: &Value) -> Option<Value> {
    change_each(messages, |message| {
        let content = message.get_mut("content")?;
        let parts = content.as_array()?;
        let texts: Option<Vec<&str>> = parts.iter().map(|p| p.get("text")?.as_str()).collect();
        *content = texts?.concat().into();
        Some(())
    })
}

/// Arguments of tool calls as JSON text.
pub(super) fn arguments_as_text(messages: &Value) -> Option<Value> {
    change_arguments(messages, |arguments| {
        arguments.is_object().then(|| Value::from(arguments.to_string()))
    })
}

/// Arguments of tool calls as objects.
pub(super) fn arguments_as_objects(messages: &Value) -> Option<Value> {
    change_arguments(messages, |arguments| {
        serde_json::from_str(arguments.as_str()?).ok().filter(Value::is_object)
    })
}

fn change_arguments(messages: &Value, new: impl Fn(&Value) -> Option<Value>) -> Option<Value> {
    change_each(messages, |message| {
        let mut n_changed = 0;
        for call in message.get_mut("tool_calls")?.as_array_mut()? {
            let arguments = call.get_mut("function").and_then(|f| f.get_mut("arguments"));
            if let Some(arguments) = arguments
                && let Some(changed) = new(arguments)
            {
                *arguments = changed;
                n_changed += 1;
            }
        }
        (n_changed > 0).then_some(())
    })
}

fn change_each(messages: &Value, change: impl Fn(&mut Value) -> Option<()>) -> Option<Value> {
    let mut messages = messages.clone();
    let n_changed = messages.as_array_mut()?.iter_mut().filter_map(change).count();
    (n_changed > 0).then_some(messages)
}
