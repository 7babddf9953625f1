//! The time a template may ask for, and Python's `strftime` of it.

use std::fmt::Write;

/// A point in time as a calendar shows it. The caller decides the time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what they are called; month and day from 1")]
pub struct ChatTime {
    pub year: i32,
    pub month: u8,
    pub day: u8,
    pub hour: u8,
    pub minute: u8,
    pub second: u8,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const SECONDS_PER_DAY: i64 = 86_400;
/// Keeps the year within four digits.
const SECONDS_MAX: i64 = 253_402_300_799;

impl ChatTime {
    /// From seconds since 1970 in UTC; times before that or after the year 9999 count as the nearest in between.
    pub fn from_unix(seconds: i64) -> Self {
        let seconds = seconds.clamp(0, SECONDS_MAX);
        let (days, rest) = (seconds / SECONDS_PER_DAY, seconds % SECONDS_PER_DAY);
        // Days are counted from 1 March of year 0, so that leap days end a year; 146,097 days are 400 years.
        let days = days + 719_468;
        let (era, day_of_era) = (days / 146_097, days % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        Self {
            year: (era * 400 + year_of_era + i64::from(month <= 2)) as i32,
            month: month as u8,
            day: (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u8,
            hour: (rest / 3_600) as u8,
            minute: (rest / 60 % 60) as u8,
            second: (rest % 60) as u8,
        }
    }

    /// Days since the year began, from 1.
    fn day_of_year(self) -> u32 {
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let month = usize::from(self.month.saturating_sub(1));
        let days: u32 = before.get(month).copied().unwrap_or(0);
        days + u32::from(leap && self.month > 2) + u32::from(self.day)
    }

    /// Days since Monday.
    fn weekday(self) -> usize {
        let year = i64::from(self.year) - 1;
        let days = year * 365 + year / 4 - year / 100 + year / 400 + i64::from(self.day_of_year());
        (days + 6).rem_euclid(7) as usize
    }

    /// Python's `strftime` in the C locale. `%-d` and its like leave out leading zeros; an unknown
    /// directive stays as it is.
    pub fn format(self, format: &str) -> String {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let bare = directive == Some('-');
            if bare {
                directive = chars.next();
            }
            match directive {
                Some(directive) => self.write(directive, bare, &mut out),
                None => out.push_str(if bare { "%-" } else { "%" }),
            }
        }
        out
    }

    fn write(self, directive: char, bare: bool, out: &mut String) {
        let hour_12 = (self.hour + 11) % 12 + 1;
        let month = MONTHS.get(usize::from(self.month.saturating_sub(1))).copied().unwrap_or("");
        let day = DAYS.get(self.weekday()).copied().unwrap_or("");
        let short = |name: &str| name.chars().take(3).collect::<String>();
        let number = |n: u32, width: usize| {
            if bare { n.to_string() } else { format!("{n:0width$}") }
        };
        match directive {
            'Y' => _ = write!(out, "{:04}", self.year),
            'y' => out.push_str(&number(self.year.rem_euclid(100) as u32, 2)),
            'm' => out.push_str(&number(self.month.into(), 2)),
            'd' => out.push_str(&number(self.day.into(), 2)),
            'e' => _ = write!(out, "{:>2}", self.day),
            'H' => out.push_str(&number(self.hour.into(), 2)),
            'I' => out.push_str(&number(hour_12.into(), 2)),
            'M' => out.push_str(&number(self.minute.into(), 2)),
            'S' => out.push_str(&number(self.second.into(), 2)),
            'j' => out.push_str(&number(self.day_of_year(), 3)),
            'p' => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'B' => out.push_str(month),
            'b' | 'h' => out.push_str(&short(month)),
            'A' => out.push_str(day),
            'a' => out.push_str(&short(day)),
            'F' => out.push_str(&self.format("%Y-%m-%d")),
            'T' => out.push_str(&self.format("%H:%M:%S")),
            'R' => out.push_str(&self.format("%H:%M")),
            'D' => out.push_str(&self.format("%m/%d/%y")),
            '%' => out.push('%'),
            other => {
                out.push_str(if bare { "%-" } else { "%" });
                out.push(other);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_print_as_in_python() {
        for (seconds, format, want) in [
            (0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001"),
            (951_782_400, "%d %B %Y, %a", "29 February 2000, Tue"),
            (1_768_480_496, "%b %-d, %I:%M %p %%", "Jan 15, 12:34 PM %"),
            (1_798_761_599, "%F %T %j %e", "2026-12-31 23:59:59 365 31"),
            (4_107_542_400, "%F", "2100-03-01"),
            (0, "%Q %-Q %", "%Q %-Q %"),
        ] {
            assert_eq!(ChatTime::from_unix(seconds).format(format), want);
        }
    }
}
